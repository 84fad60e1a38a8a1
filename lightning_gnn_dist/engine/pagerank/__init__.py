"""The compiled loop of personalised PageRank."""
