"""Pictures of runs: what is shown, and the two ways to draw it."""
