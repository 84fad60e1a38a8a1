"""The sampler of the nodes that matter most to each seed."""
