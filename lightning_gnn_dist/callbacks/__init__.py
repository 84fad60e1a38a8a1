"""What a user may watch a training by."""
