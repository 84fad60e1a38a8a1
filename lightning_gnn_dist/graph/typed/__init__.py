"""Types of nodes and edges: which ids and edges are of which type, and what each type carries."""
