"""One layer after the other, for all nodes."""
