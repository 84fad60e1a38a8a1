"""Data modules, and the rules that decide which part of the graph each rank holds."""
