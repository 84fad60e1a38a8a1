"""Learned rows of nodes, of which a step touches some, and of which each rank may own some."""
