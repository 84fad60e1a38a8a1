"""Pairs of stores of PyG as graphs."""
