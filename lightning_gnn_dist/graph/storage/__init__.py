"""How a graph lies in files and in memory maps, and what of them is believed."""
