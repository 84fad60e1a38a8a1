"""Subgraphs around seeds: walks and shadows."""
