"""Models defined by their layers: run on a batch, or for all nodes one layer after the other."""
