"""The steps of preparing a graph: nodes, edges, sorting, merging; each goes on where its journal says."""
