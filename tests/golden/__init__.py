"""Runs whose results must not change when code is merged or moved; ``python -m tests.golden`` compares them."""
