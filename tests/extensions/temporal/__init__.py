"""What seeds see by time."""
