"""The command ``lightning-gnn-dist``, a module for each of its commands."""
