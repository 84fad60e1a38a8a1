"""Tables: files of rows that DuckDB reads, and that become arrays of nodes and edges."""
