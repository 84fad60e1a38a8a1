"""A look at a few seeds before an evaluation."""
