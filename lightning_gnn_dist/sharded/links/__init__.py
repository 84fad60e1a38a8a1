"""Edges of a graph in shards as targets: each is asked for by the rank that owns its receiver."""
