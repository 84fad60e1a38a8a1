"""Batches: made of samples, ahead of the training, in RAM or on its device."""
