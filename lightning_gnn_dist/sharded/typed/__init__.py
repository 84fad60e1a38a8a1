"""Shards of typed graphs: draws per edge type at the rank that has the row, and rows of each type by owner."""
