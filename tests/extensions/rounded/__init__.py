"""Means in fewer bytes, and in the background."""
