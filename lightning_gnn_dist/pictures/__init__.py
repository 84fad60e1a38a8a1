"""Charts of runs, drawn as SVG in a page or as PNG."""
