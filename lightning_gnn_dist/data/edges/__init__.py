"""Edges with labels: what is asked of their arrays, and how some are held back."""
