"""A small graph, a model and a Trainer, to hold laws of data modules against."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist import Graph, LocalSGDStrategy, PartitionedDataModule, communities
from tests.every_strategy import PATIENCE
from tests.sage import SAGE


def small_graph() -> Graph:
    return communities(600, 4, num_features=12, train_share=0.15, seed=3)


def trainer(devices: int, strategy: Any = "auto", **options: Any) -> pl.Trainer:
    """A Trainer that says nothing and leaves nothing, unless it is asked to."""
    defaults: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2, "num_sanity_val_steps": 0, "logger": False}
    defaults |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(devices=devices, strategy=strategy, **(defaults | options))


def model(**options: Any) -> SAGE:
    torch.manual_seed(0)
    return SAGE(12, 4, **options)


def full_graph_logits(module: SAGE, graph: Graph) -> Tensor:
    """One forward over the whole graph, as a single process would infer."""
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    edge_index = torch.stack([graph.indices.long(), receiver])
    whole = Data(x=graph.node_arrays["x"], edge_index=edge_index, batch_size=graph.num_nodes)
    module.blocks = False
    with torch.no_grad():
        return module.eval()(whole)


def fit_with(rank: int, world_size: int, graph: Graph, options: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    trainer(world_size, LocalSGDStrategy(**PATIENCE)).fit(model(), PartitionedDataModule(graph, **options))
