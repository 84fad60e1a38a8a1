"""Processes that become ranks: who starts them, what they are given, and whether all have come."""
