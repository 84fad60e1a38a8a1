"""Files become a saved graph, or shards of one, in bounded memory."""
