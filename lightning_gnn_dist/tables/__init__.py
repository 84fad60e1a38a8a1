"""Learned rows of nodes: tables of which a step touches some rows, and of which ranks exchange those alone."""
