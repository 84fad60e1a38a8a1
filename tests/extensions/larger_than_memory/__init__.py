"""Rows that lie in files or on the device that trains."""
