"""Where the graph lives: this host has all of it, or each rank has a shard."""
