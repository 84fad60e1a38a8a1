"""``lightning-gnn-dist predict`` of all nodes, of a module whose layers are known: layer by layer."""

from __future__ import annotations

from typing import Any

from jsonargparse.typing import PositiveInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lightning_gnn_dist.data.datamodule import GraphDataModule, what_is_judged
from lightning_gnn_dist.extensions.passes.prediction import predict_by_layer
from lightning_gnn_dist.homes.run import BUDGET_BYTES
from lightning_gnn_dist.layers.through_layers import has_layers


def add_options(parser: LightningArgumentParser) -> None:
    """Add what ``predict`` takes beside its own options."""
    about = f"what predicting by layer may take on each rank, of RAM (default: {BUDGET_BYTES >> 20}) and of a GPU"
    parser.add_argument("--budget_megabytes", type=PositiveInt | None, default=None, help=about)


def predict(trainer: Trainer, options: Any, model: LightningModule, datamodule: Any, **kwargs: Any) -> bool:
    """Write the rows of all nodes, if these are asked for and layers give them; return whether they do."""
    leaves_out = getattr(getattr(datamodule, "sampler", None), "leaves_types_out", False)
    ranks_at_times = hasattr(datamodule, "split") and getattr(datamodule, "task", None) is not None
    is_of_all = options.nodes is None and options.output is not None and isinstance(datamodule, GraphDataModule)
    if not is_of_all or leaves_out or ranks_at_times or not has_layers(model):
        return False
    graph = what_is_judged(datamodule)
    budget = None if options.budget_megabytes is None else options.budget_megabytes << 20
    how = {"budget_bytes": budget, "overwrite": options.overwrite, "ids_of": options.ids_of}
    predict_by_layer(trainer, model, graph, options.output, **how, **kwargs)
    return True
