"""Models defined by their layers: run on a batch, or one layer after the other for all nodes."""
