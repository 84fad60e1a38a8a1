"""The loops that draw neighbourhoods: compiled kernels, and torch operators that draw the same."""
