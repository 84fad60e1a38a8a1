"""Edges drawn in proportion to their weights."""
