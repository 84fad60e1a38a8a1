"""The whole graph: one in-neighbour CSR and per-node arrays, in RAM or memory-mapped."""
