"""Parts of graphs with types, and what data modules refuse of such graphs."""
