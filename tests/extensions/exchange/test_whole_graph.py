"""An exchange loses nothing: ranks take the steps of one process on the whole graph, also with types."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data

import lightning_gnn_dist as lgd
from tests.boundary.models import MODELS, Weights, check_learned, weighted_data
from tests.boundary.test_whole_graph import STEPS, fit, odd
from tests.boundary.typed_parts import CLOSE, DATA, OPTIONS, RANKS, owners
from tests.cli.test_train import check_config
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.extensions.ready_made.models_by_layers import READY
from tests.layers.typed_model import ByLayers
from tests.ranks import run_ranks


def exchanges(num_layers: int, data: Data, world_size: int) -> dict[str, Any]:
    return {
        "partitioner": odd(data, world_size),
        "sampler": lgd.WholePartSampler(num_layers),
        "boundary": lgd.Exchange(),
    }


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5))])
def test_an_exchange_loses_nothing(world_size: int) -> None:
    data = weighted_data()
    cases = [(name, 3) for name in MODELS + (READY if world_size > 2 else [])] + [("SAGE", 1), ("GAT", 2)]
    check_learned(cases, run_ranks(fit, world_size, data, cases, {"data": exchanges}), STEPS)


@pytest.mark.slow
def test_an_exchange_loses_nothing_under_ddp() -> None:
    data = weighted_data()
    cases = [("SAGE", 2), ("JK", 3)]
    check_learned(cases, run_ranks(fit, 3, data, cases, {"data": exchanges, "strategy": plain_ddp}), STEPS)


def by_hand(num_layers: int, steps: int) -> Weights:
    """Gradient descent of one process on the whole graph."""
    module, papers = ByLayers(DATA.edge_types, num_layers), DATA["paper"]
    for _ in range(steps):
        rows = module.whole(DATA)["paper"]
        loss = F.cross_entropy(rows[papers.train_mask], papers.y[papers.train_mask])
        gradient = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
        for p, g in zip(module.parameters(), gradient, strict=True):
            p.data -= 0.1 * (0 if g is None else g)
    return {name: p.detach() for name, p in module.named_parameters()}


def exchanged(
    rank: int,
    world_size: int,
    where: Any,
    num_layers: int,
    folder: Path,
    exchange: lgd.Exchange,
    accelerator: str = "cpu",
) -> Weights:
    options: dict[str, Any] = OPTIONS | {"accelerator": accelerator}

    def fit(epochs: int, **resumed: Any) -> ByLayers:
        cut = {} if isinstance(where, Path) else {"partitioner": owners(where, world_size)}
        data = lgd.PartitionedDataModule(
            where, sampler=lgd.WholePartSampler(num_layers), boundary=exchange, seed=0, **cut
        )
        run = trainer(
            world_size, lgd.GrappaStrategy(**PATIENCE, find_unused_parameters=True), max_epochs=epochs, **options
        )
        module = ByLayers(DATA.edge_types, num_layers)
        run.fit(module, data, **resumed)
        run.save_checkpoint(folder / "half.ckpt")
        return module

    fit(2)
    return {name: p.detach().cpu() for name, p in fit(4, ckpt_path=folder / "half.ckpt").named_parameters()}


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("num_layers", "place"), [pytest.param(2, "RAM", marks=pytest.mark.slow), (3, "RAM"), (2, "shards")]
)
def test_an_exchange_is_one_process(num_layers: int, place: str, accelerator: str, tmp_path: Path) -> None:
    where: Any = lgd.Graph.from_pyg(DATA)
    num_ranks = RANKS if place == "RAM" else 2
    if accelerator == "gpu" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"fewer than {num_ranks} CUDA devices")
    if place == "shards":
        lgd.save_shards(where, owners(where, 2), tmp_path / "shards")
        where = tmp_path / "shards"
    expected = by_hand(num_layers, 4)
    for found in run_ranks(exchanged, num_ranks, where, num_layers, tmp_path, lgd.Exchange(), accelerator):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **CLOSE)


@pytest.mark.slow
def test_the_shipped_config_trains(tmp_path: Path) -> None:
    check_config("whole_graph.yaml", tmp_path)
