"""Training on parts that lack nothing is training on the whole graph, step for step, also with types."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import lightning_gnn_dist as lgd
from tests.boundary.models import MODELS, READY, Weights, check_learned, model, weighted_data, weights_of
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.layers.models import graph_of
from tests.layers.typed_model import ByLayers, some_data
from tests.ranks import run_ranks

STEPS = 3


def unequal(data: Data, world_size: int) -> lgd.Partition:
    """Parts of which each is twice the next."""
    chance = torch.rand(data.num_nodes, generator=torch.Generator().manual_seed(1))
    limits = torch.tensor([1 - 0.5**part for part in range(1, world_size)])
    return lgd.Partition(torch.bucketize(chance, limits).to(torch.int32), world_size)


def fit(rank: int, world_size: int, data: Data, cases: list[tuple[str, int]], options: dict[str, Any]) -> list[Weights]:
    found = []
    for name, num_layers in cases:
        module = model(name, num_layers)
        parts = lgd.PartitionedDataModule(graph_of(data), **options["data"](num_layers, data, world_size))
        strategy = options.get("strategy", lambda: lgd.GrappaStrategy(**PATIENCE))()
        more: dict[str, Any] = {"max_epochs": STEPS, "limit_val_batches": 0, "precision": "64-true"}
        trainer(world_size, strategy, **more).fit(module, parts)
        found.append(weights_of(module))
    return found


def halos(num_layers: int, data: Data, world_size: int) -> dict[str, Any]:
    sampler = lgd.NeighborSampler([-1] * num_layers)
    return {"partitioner": unequal(data, world_size), "sampler": sampler, "boundary": lgd.Halo(num_layers)}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_halos_as_deep_as_the_model_lose_nothing(world_size: int) -> None:
    data = weighted_data()
    cases = [(name, 2) for name in MODELS] + [("SAGE", 3)]
    check_learned(cases, run_ranks(fit, world_size, data, cases, {"data": halos}), STEPS)


def exchanges(num_layers: int, data: Data, world_size: int) -> dict[str, Any]:
    return {
        "partitioner": odd(data, world_size),
        "sampler": lgd.WholePartSampler(num_layers),
        "boundary": lgd.Exchange(),
    }


def odd(data: Data, world_size: int) -> lgd.Partition:
    """Parts of unequal sizes: of four, one has no training node, one no edge to others, and one no node."""
    owner = unequal(data, min(world_size, 2)).assignment.clone()
    if world_size > 2:
        some = (~data.train_mask).nonzero().view(-1)[::3]
        owner[some] = 2
    if world_size > 4:
        owner[-5:] = 3  # nodes without edges
    return lgd.Partition(owner, world_size)


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


CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
DATA, RANKS = some_data(), 3


def owners(graph: lgd.Graph, num_parts: int = RANKS) -> lgd.Partition:
    """Parts of unequal sizes; the last one has authors and venues alone, so nothing to learn."""
    owner = (torch.arange(graph.num_nodes) * 7 % 11 < 4).int()
    if num_parts > 2:
        for kind in ("author", "venue"):
            nodes = graph.types.nodes_of(kind)
            owner[nodes.start + 1 : nodes.stop : 3] = 2
    return lgd.Partition(owner, num_parts)


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


OPTIONS: dict[str, Any] = {"precision": "64-true", "limit_val_batches": 0}


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("num_layers", "place"), [(2, "RAM"), (3, "RAM"), (2, "shards")])
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


def part_loss(module: ByLayers, data: HeteroData, inside: dict[str, Tensor], known: list[dict[str, Tensor]]) -> Tensor:
    """The loss of a part: of nodes outside of it, layers read the rows of the last meeting."""
    x = data.x_dict
    for index in range(len(module.convs)):
        x = module.rows(index, x, data.edge_index_dict)
        if index < len(known):
            x = {kind: torch.where(inside[kind][:, None], x[kind], known[index][kind]) for kind in x}
    seeds = inside["paper"] & data["paper"].train_mask
    return F.cross_entropy(x["paper"][seeds], data["paper"].y[seeds])


def history_by_hand(num_layers: int, rounds: int, steps: int, owner: Tensor, graph: lgd.Graph) -> Weights:
    module = ByLayers(DATA.edge_types, num_layers)
    for _ in range(rounds):
        known, x = list[dict[str, Tensor]](), DATA.x_dict
        with torch.no_grad():
            for index in range(num_layers - 1):
                known.append(x := module.rows(index, x, DATA.edge_index_dict))
        replicas = []
        for rank in range(2):
            replica = ByLayers(DATA.edge_types, num_layers)
            replica.load_state_dict(module.state_dict())
            of_types = {kind: graph.types.nodes_of(kind) for kind in DATA.node_types}
            inside = {kind: owner[nodes.start : nodes.stop] == rank for kind, nodes in of_types.items()}
            for _ in range(steps):
                weights, loss = list(replica.parameters()), part_loss(replica, DATA, inside, known)
                for p, g in zip(weights, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
                    p.data -= 0.1 * (0 if g is None else g)
            replicas.append(replica)
        pairs = zip(*(replica.parameters() for replica in replicas), strict=True)
        for p, values in zip(module.parameters(), pairs, strict=True):
            p.data = torch.stack([value.detach() for value in values]).mean(0)
    return {name: p.detach() for name, p in module.named_parameters()}


def remembered(rank: int, world_size: int, num_layers: int, sampler: Any, folder: Path) -> Weights:
    graph = lgd.Graph.from_pyg(DATA)

    def fit(epochs: int, **resumed: Any) -> ByLayers:
        how: dict[str, Any] = {"sampler": sampler, "boundary": lgd.History(), "batch_size": 1000, "seed": 0}
        data = lgd.PartitionedDataModule(graph, partitioner=owners(graph, 2), **how)
        strategy = lgd.LocalSGDStrategy(lgd.EverySteps(2), weights="uniform", **PATIENCE)
        module = ByLayers(DATA.edge_types, num_layers)
        run = trainer(world_size, strategy, max_epochs=epochs, **OPTIONS)
        run.fit(module, data, **resumed)
        run.save_checkpoint(folder / "half.ckpt")
        return module

    fit(1)
    return {name: p.detach() for name, p in fit(3, ckpt_path=folder / "half.ckpt").named_parameters()}


@pytest.mark.parametrize(
    ("num_layers", "sampler"),
    [(2, lgd.WholePartSampler(2)), (3, lgd.WholePartSampler(3)), (2, lgd.NeighborSampler([-1, -1]))],
)
def test_local_steps_with_rows_of_the_last_meeting_are_those_by_hand(
    num_layers: int, sampler: Any, tmp_path: Path
) -> None:
    graph = lgd.Graph.from_pyg(DATA)
    expected = history_by_hand(num_layers, 3, 2, owners(graph, 2).assignment, graph)
    for found in run_ranks(remembered, 2, num_layers, sampler, tmp_path):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **CLOSE)


class Rounded(ByLayers):
    """Its second layer returns whole numbers, which have no gradient."""

    def layers(self) -> Any:
        first, second, last = super().layers()
        return [first, lambda batch: {kind: rows.long() for kind, rows in second(batch).items()}, last]


def refused(rank: int, world_size: int) -> str:
    graph = lgd.Graph.from_pyg(DATA)
    options: dict[str, Any] = {
        "sampler": lgd.WholePartSampler(3),
        "boundary": lgd.Exchange(),
        "partitioner": owners(graph, 2),
    }
    run = trainer(world_size, lgd.GrappaStrategy(**PATIENCE, find_unused_parameters=True), max_epochs=1, **OPTIONS)
    with pytest.raises(TypeError) as caught:
        run.fit(Rounded(DATA.edge_types, 3), lgd.PartitionedDataModule(graph, **options))
    return str(caught.value)


def test_an_error_names_the_layer_whatever_the_number_of_types() -> None:
    for said in run_ranks(refused, 2):
        assert said.startswith("Layer 1 returned rows of torch.int64")
