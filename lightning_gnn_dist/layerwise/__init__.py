"""Prediction for all nodes, one layer after the other."""
