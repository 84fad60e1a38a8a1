"""The sampler of graphs whose edges or nodes have a time."""
