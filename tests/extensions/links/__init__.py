"""Edges that are learned and judged."""
