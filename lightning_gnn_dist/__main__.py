"""``python -m lightning_gnn_dist`` is the command ``lightning-gnn-dist``."""

from lightning_gnn_dist.cli.main import main

if __name__ == "__main__":
    main()
