"""The start of ranks where no script can be run again: they do one call of a trainer, and give back what it changed."""
