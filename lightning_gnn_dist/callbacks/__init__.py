"""Callbacks that watch a training, and write reports, predictions and checkpoints."""
