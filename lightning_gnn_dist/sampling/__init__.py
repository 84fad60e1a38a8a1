"""Samplers: they take the seeds of many batches and return the neighbourhood of each."""
