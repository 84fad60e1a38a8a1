"""Databases: folders of tables with keys, of which a graph and its tasks are made."""
