"""Errors of models on their features, labels and tables, in the user's terms: torch speaks of two matrices only."""
