"""A graph that changes: what is asked of it, how it is done, and the log of it beside a saved graph."""
