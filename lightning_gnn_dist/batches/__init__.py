"""A sample becomes a batch, in time."""
