"""Ranks that may die and come back."""
