"""How a graph is stored in files, mapped into memory and checked."""
