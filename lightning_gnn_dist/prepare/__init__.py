"""Turns files into a saved graph, or into shards of one, in bounded memory."""
