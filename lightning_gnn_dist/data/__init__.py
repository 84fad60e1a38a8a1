"""What a rank reads: data modules, and what they decide by."""
