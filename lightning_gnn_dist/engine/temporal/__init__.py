"""Sampling by time: events in the order of their times, and trees that grow from each seed alone."""
