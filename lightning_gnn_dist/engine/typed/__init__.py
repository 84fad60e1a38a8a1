"""Sampling of graphs with types: neighbours per edge type, and one batch taken apart into its types."""
