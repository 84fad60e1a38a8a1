"""A graph that no host holds: each rank has a share of its rows, and asks the others for what it lacks."""
