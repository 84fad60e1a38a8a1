"""A small graph, a model and a Trainer, to hold laws of data modules against."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist import Graph, LocalSGDStrategy, PartitionedDataModule, communities
from tests.every_strategy import PATIENCE, every_strategy
from tests.sage import SAGE


def small_graph() -> Graph:
    return communities(600, 4, num_features=12, train_share=0.15, seed=3)


def trainer(devices: int, strategy: Any = "auto", **options: Any) -> pl.Trainer:
    """A Trainer that says nothing and leaves nothing, unless it is asked to."""
    defaults: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2, "num_sanity_val_steps": 0, "logger": False}
    defaults |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(devices=devices, strategy=strategy, **(defaults | options))


def fit_whole_and_resumed(make: Callable[[], tuple[pl.LightningModule, Any]], path: Path) -> tuple[Any, Any, Any]:
    """Check that a fit ends as one that was stopped after a pass; return the last Trainer, module and data module."""
    weights = []
    for stops in (False, True):
        if stops:
            short = trainer(1, max_epochs=1)
            short.fit(*make())
            short.save_checkpoint(path)
        (module, data), fit = make(), trainer(1)
        fit.fit(module, data, ckpt_path=path if stops else None)
        weights.append(torch.nn.utils.parameters_to_vector(module.parameters()))
    assert weights[0].equal(weights[1])
    return fit, module, data


SOME_STRATEGIES = [["llcg"], pytest.param(["grappa", "local_sgd", "tma"], marks=pytest.mark.slow)]


def fit_and_test(
    rank: int, world_size: int, names: list[str], make: Callable[[str], tuple[Any, Any]], records: str
) -> list[tuple[dict[str, Tensor], dict[str, float], Any]]:
    """With each strategy the weights, the metrics of a test, and what the module has recorded in it."""
    found = []
    for name in names:
        module, data = make(name)
        running = trainer(world_size, every_strategy()[name](), max_epochs=2)
        running.fit(module, data)
        getattr(module, records).clear()
        (metrics,) = running.test(module, data, verbose=False)
        found.append((dict(module.state_dict()), dict(metrics), copy.copy(getattr(module, records))))
    return found


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
    trainer(world_size, LocalSGDStrategy(**PATIENCE)).fit(model(), PartitionedDataModule(graph, **options))
