"""Partitioners: every node of the graph in exactly one part."""
