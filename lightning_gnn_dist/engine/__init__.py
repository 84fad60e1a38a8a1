"""Loops that draw neighbourhoods: compiled kernels, and their twins in torch operators."""
