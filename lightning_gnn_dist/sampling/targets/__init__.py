"""Edges as targets: what a batch asks for becomes seeds, wherever the graph lives."""
