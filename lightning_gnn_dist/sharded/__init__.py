"""A graph that no host holds."""
