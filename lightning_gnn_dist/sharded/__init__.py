"""Training on a graph that no host holds: each host has a shard of it."""
