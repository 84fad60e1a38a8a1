"""What a user may add, a folder each: none is known to the rest of the package, and each can be deleted."""
