"""Where batches are made: what of a graph lies on the device that trains, and how batches get there."""
