"""The command ``lightning-gnn-dist``, with a module for each of its subcommands."""
