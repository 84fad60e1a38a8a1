"""``lightning-gnn-dist predict --best_links=K``: the best new links of nodes."""

from __future__ import annotations

from typing import Any

from jsonargparse.typing import PositiveInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lightning_gnn_dist.cli.train import nodes_asked
from lightning_gnn_dist.extensions.links.best_links import LeftOut, Score, best_links
from lightning_gnn_dist.extensions.links.link_datamodule import LinkDataModule
from lightning_gnn_dist.extensions.passes.command import how_to_write


def add_options(parser: LightningArgumentParser) -> None:
    """Add what ``predict`` takes beside its own options."""
    about = "write the K best new links of each node, or of those that --nodes names, of a LinkDataModule"
    parser.add_argument("--best_links", type=PositiveInt | None, default=None, help=about)
    about = "how --best_links scores pairs: by forward(), or by dot products of rows"
    parser.add_argument("--score", type=Score, default="model", help=about)
    about = "which pairs --best_links leaves out: edges, held ones (val, test), a node for itself (self)"
    parser.add_argument("--leave_out", type=list[LeftOut], default=["edges", "self"], help=about)


def predict(trainer: Trainer, options: Any, model: LightningModule, datamodule: Any, **kwargs: Any) -> bool:
    """Write the best links, if they are asked for; return whether they are."""
    if options.best_links is None:
        return False
    if not isinstance(datamodule, LinkDataModule):
        raise TypeError(f"--best_links={options.best_links} is for LinkDataModule, not {type(datamodule).__name__}.")
    if options.output is None:
        raise ValueError("--best_links would keep nothing: name a file for them, --output=links.npy.")
    split = datamodule.split if datamodule.shards_path is None else datamodule.shards_path
    if split is None:
        raise ValueError(
            f"--best_links={options.best_links} is for a split, and task {datamodule.task!r} recommends by itself: "
            "leave it out, and --output has the best receivers of each question."
        )
    how = {"k": options.best_links, "score": options.score, "leave_out": options.leave_out, **how_to_write(options)}
    how["senders"] = None if options.nodes is None else nodes_asked(datamodule, options)
    best_links(trainer, model, split, options.output, **how, **kwargs)
    return True
