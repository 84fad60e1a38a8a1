"""What graphs with types are prepared of: the nodes and the edges of one type, in files."""
