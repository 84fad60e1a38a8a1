"""Local steps that read rows of the last meeting are those by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.wire.collectives import traffic
from tests.boundary.models import Model, Weights, model, weighted_data, weights_of
from tests.boundary.test_whole_graph import unequal
from tests.boundary.typed_parts import CLOSE, DATA, OPTIONS, owners
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.layers.models import graph_of
from tests.layers.typed_model import ByLayers, some_data
from tests.ranks import run_ranks

RANKS, ROUNDS, STEPS, CHUNKS = 3, 3, 2, 9


# By hand, without a line of this package.


def layer(module: Any, index: int, data: Data, x: Tensor) -> Tensor:
    conv = module.convs[index]
    weights = [data.edge_weight] if type(module).__name__ == "Weighted" else []
    return module._between(conv, conv(x, data.edge_index, *weights))


def rows_of_meeting(module: Any, data: Data) -> list[Tensor]:
    """What every layer but the last makes of all nodes."""
    rows, x = [], data.x
    with torch.no_grad():
        for index in range(len(module.convs) - 1):
            rows.append(x := layer(module, index, data, x))
    return rows


def loss_of_part(module: Any, data: Data, own: Tensor, inside: Tensor, known: list[Tensor]) -> Tensor:
    x = data.x
    for index in range(len(module.convs)):
        x = layer(module, index, data, x)
        if index < len(known):
            x = torch.where(inside[:, None], x, known[index])
    seeds = own & data.train_mask
    return functional.cross_entropy(x[seeds], data.y[seeds])


@dataclass
class ByHand:
    """Local SGD with the rows of meetings; ``held`` gives each rank's own nodes and all that it computes in a round."""

    name: str
    num_layers: int
    held: Callable[[int], list[tuple[Tensor, Tensor]]]
    corrects: bool = False
    drifts: bool = False
    data: Data = field(default_factory=weighted_data)

    def learned(self, rounds: int) -> Weights:
        replicas = [model(self.name, self.num_layers) for _ in self.held(0)]
        optimizers = [replica.configure_optimizers() for replica in replicas]
        for number in range(rounds):
            known, parts = rows_of_meeting(replicas[0], self.data), self.held(number)
            anchors = [self.gradient(replica, *part, known) for replica, part in zip(replicas, parts, strict=True)]
            for replica, optimizer, part, anchor in zip(replicas, optimizers, parts, anchors, strict=True):
                for step in range(STEPS):
                    optimizer.zero_grad()
                    loss_of_part(replica, self.data, *part, known).backward()
                    for index, p in enumerate(replica.parameters()):
                        mean = torch.stack([other[index] for other in anchors]).mean(0)
                        p.grad += self.drifts * 0.8**step * (mean - anchor[index])
                    optimizer.step()
            self.meet(replicas)
        return weights_of(replicas[0])

    def gradient(self, replica: Model, own: Tensor, inside: Tensor, known: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss_of_part(replica, self.data, own, inside, known), list(replica.parameters()))

    def meet(self, replicas: list[Model]) -> None:
        mean = [
            torch.stack([p.detach() for p in of_ranks]).mean(0)
            for of_ranks in zip(*map(list_of, replicas), strict=True)
        ]
        for replica in replicas:
            for p, value in zip(replica.parameters(), mean, strict=True):
                p.data.copy_(value)
            if self.corrects:
                all_nodes = torch.ones(self.data.num_nodes, dtype=torch.bool)
                gradient = self.gradient(replica, all_nodes, all_nodes, rows_of_meeting(replica, self.data))
                for p, value in zip(replica.parameters(), gradient, strict=True):
                    p.data -= 0.1 * value


def list_of(module: Model) -> list[Tensor]:
    return list(module.parameters())


def fixed(owner: Tensor) -> Callable[[int], list[tuple[Tensor, Tensor]]]:
    return lambda _: [(owner == rank, owner == rank) for rank in range(RANKS)]


def rotated(owner: Tensor) -> Callable[[int], list[tuple[Tensor, Tensor]]]:
    def held(number: int) -> list[tuple[Tensor, Tensor]]:
        others = [(rank + 1 + number % (RANKS - 1)) % RANKS for rank in range(RANKS)]
        return [(owner == rank, (owner == rank) | (owner == other)) for rank, other in enumerate(others)]

    return held


def redealt(chunks: Tensor) -> Callable[[int], list[tuple[Tensor, Tensor]]]:
    def held(number: int) -> list[tuple[Tensor, Tensor]]:
        dealt = [lgd.Redeal(CHUNKS).held(number, rank, RANKS, 0).own for rank in range(RANKS)]
        return [(torch.isin(chunks, torch.tensor(own)),) * 2 for own in dealt]

    return held


# With the package.


def parts(num_layers: int, **options: Any) -> lgd.PartitionedDataModule:
    data = weighted_data()
    defaults: dict[str, Any] = {"partitioner": unequal(data, RANKS), "sampler": lgd.WholePartSampler(num_layers)}
    defaults |= {"boundary": lgd.History(), "batch_size": 1000}
    return lgd.PartitionedDataModule(graph_of(data), **(defaults | options))


def averaging(**options: Any) -> lgd.LocalSGDStrategy:
    return lgd.LocalSGDStrategy(lgd.EverySteps(STEPS), **options, **PATIENCE)


def drifting() -> lgd.LocalSGDStrategy:
    return averaging(drift=lgd.Drift("ranks"))


def correcting() -> lgd.LLCGStrategy:
    correction = lgd.Correction(1, optimizer=partial(torch.optim.SGD, lr=0.1))
    return lgd.LLCGStrategy.as_published(lgd.EverySteps(STEPS), correction=correction, **PATIENCE)


def quick(strategy: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"max_epochs": ROUNDS, "limit_val_batches": 0, "precision": "64-true"}
    return trainer(RANKS, strategy, **(defaults | options))


OWNER = unequal(weighted_data(), RANKS).assignment.long()
SUPERNODES = torch.arange(OWNER.numel()) % CHUNKS
DEALT = {
    "partitioner": lgd.Partition(SUPERNODES.to(torch.int32), CHUNKS),
    "holding": lgd.Holding(lgd.Redeal(CHUNKS), every=STEPS),
}
ROTATED = {"holding": lgd.Holding(lgd.Rotate(), every=STEPS)}
WHOLE_BATCHES = {"global_batching": lgd.GlobalBatching(batch_size=1000)}
CASES: dict[str, tuple[ByHand, Callable[[], Any], dict[str, Any]]] = {
    "SAGE": (ByHand("SAGE", 3, fixed(OWNER)), averaging, {}),
    "GCN": (ByHand("GCN", 3, fixed(OWNER)), averaging, {"sampler": lgd.NeighborSampler([-1] * 3)}),
    "rotated, with drift": (ByHand("SAGE", 3, rotated(OWNER), drifts=True), drifting, ROTATED),
    "redealt": (ByHand("GCN", 2, redealt(SUPERNODES)), averaging, DEALT),
    "corrected": (ByHand("SAGE", 3, fixed(OWNER), corrects=True), correcting, WHOLE_BATCHES),
}


def fit(rank: int, world_size: int, names: list[str]) -> list[Weights]:
    found = []
    for name in names:
        by_hand, strategy, options = CASES[name]
        module = model(by_hand.name, by_hand.num_layers)
        quick(strategy()).fit(module, parts(by_hand.num_layers, **options))
        found.append(weights_of(module))
    return found


def test_local_steps_with_rows_of_the_last_meeting_are_those_by_hand() -> None:
    of_ranks = run_ranks(fit, RANKS, list(CASES))
    for case, name in enumerate(CASES):
        expected = CASES[name][0].learned(ROUNDS)
        for found in of_ranks:
            for key, value in expected.items():
                assert torch.allclose(found[case][key], value, rtol=0, atol=1e-12), (name, key)
                assert torch.equal(found[case][key], of_ranks[0][case][key]), "replicas differ"


def resumed(rank: int, world_size: int, folder: Path) -> tuple[Weights, Weights]:
    """The weights of a fit that never stopped, and of one that did."""
    _, strategy, options = CASES["rotated, with drift"]
    found = []
    for rounds, path in ((ROUNDS, None), (1, None), (ROUNDS, folder / "stopped.ckpt")):
        module, running = model("SAGE", 3), quick(strategy(), max_epochs=rounds)
        running.fit(module, parts(3, **options), ckpt_path=path)
        if rounds == 1:
            running.save_checkpoint(folder / "stopped.ckpt")
        found.append(weights_of(module))
    return found[0], found[2]


@pytest.mark.slow
def test_a_resumed_fit_is_one_that_never_stopped(tmp_path: Path) -> None:
    for whole, stopped in run_ranks(resumed, RANKS, tmp_path):
        for key, value in whole.items():
            assert torch.equal(stopped[key], value), key


# What it sends.


def sent(rank: int, world_size: int) -> list[float]:
    """The bytes of a round with rows of the last meeting, and without."""
    found = []
    for boundary in (lgd.History(), lgd.Halo()):
        before = list[float]()

        class Count(pl.Callback):
            def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any, before: list[float] = before) -> None:
                before.append(traffic.bytes_sent)

        quick(averaging(), callbacks=[Count()]).fit(model("SAGE", 3), parts(3, boundary=boundary))
        found.append(before[2] - before[1])
    return found


def rows_moved(data: Data, owner: list[int], num_layers: int) -> list[int]:
    """The rows that each rank sends at a meeting, counted edge by edge."""
    edges, sent = list(zip(*data.edge_index.tolist(), strict=True)), [0] * RANKS
    local, told = set(data.train_mask.nonzero().view(-1).tolist()), set[int]()  # computed in steps, and for others
    for _ in range(num_layers - 1):
        asked = {(u, owner[v]) for u, v in edges if v in local | told and owner[u] != owner[v]}
        for sender, _ in asked:
            sent[owner[sender]] += 1
        local |= {u for u, v in edges if v in local and owner[u] == owner[v]}
        told |= {u for u, _ in asked} | {u for u, v in edges if v in told}
    return sent


@pytest.mark.slow
def test_a_round_sends_the_rows_that_edges_ask_for() -> None:
    headers = 2 * (RANKS - 1) * 8 * 11  # eleven numbers behind two layers
    moved_by = rows_moved(weighted_data(), OWNER.tolist(), 3)
    for moved, (with_rows, without) in zip(moved_by, run_ranks(sent, RANKS), strict=True):
        assert with_rows - without == pytest.approx(moved * 5 * 8 + headers, abs=1e-6)


# What is refused, and who is named where a rank does not answer.


class WithoutLayers(Model):
    layers = None  # type: ignore[assignment]


def no_rounds() -> lgd.GrappaStrategy:
    return lgd.GrappaStrategy(**PATIENCE)


def by_time() -> lgd.TMAStrategy:
    return lgd.TMAStrategy(lgd.EverySeconds(30.0), **PATIENCE)


CHANGING = {"holding": lgd.Holding(lgd.Rotate(), every=3)}
REFUSED: list[tuple[Any, int, Callable[[], Any], dict[str, Any], str]] = [
    (Model, 3, no_rounds, {}, "GrappaStrategy has no meetings: use LocalSGDStrategy(), LLCGStrategy() or TMAStrategy"),
    (WithoutLayers, 3, averaging, {}, "WithoutLayers does not say what its layers are: define layers()"),
    (Model, 2, averaging, {}, "layers() returns 2 layers, and the sampler has 3 hops"),
    (Model, 3, averaging, CHANGING, "round 1 is of batches 2 to 3, and parts change every 3 batches"),
    (Model, 3, by_time, CHANGING, "with EverySeconds(seconds=30.0) nobody knows before when that is"),
]


def refused(rank: int, world_size: int) -> list[str]:
    said = []
    for kind, num_layers, strategy, options, _ in REFUSED:
        try:
            quick(strategy()).fit(kind(SAGEConv, num_layers).double(), parts(3, **options))
        except (ValueError, AttributeError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_known_at_meetings_is_refused() -> None:
    for said in run_ranks(refused, RANKS):
        for found, (*_, message) in zip(said, REFUSED, strict=True):
            assert message in found


def test_ranks_that_may_die_are_refused() -> None:
    pytest.importorskip("torchft")
    strategy = lgd.TMAStrategy(lgd.EverySteps(STEPS), peers=lgd.Elastic())
    with pytest.raises(ValueError, match=r"with peers=Elastic\(\) ranks may die at any time: use boundary=Halo\(\)"):
        trainer(1, strategy).fit(model("SAGE", 3), parts(3))


def test_shards_have_no_rows_of_meetings(tmp_path: Path) -> None:
    graph = small_graph()
    lgd.save_shards(graph, lgd.RandomPartitioner()(graph, 2, 0), tmp_path / "shards")
    with pytest.raises(ValueError, match=r"boundary must be .* for shards, got History\(\)"):
        lgd.PartitionedDataModule(tmp_path / "shards", boundary=lgd.History())


class Faulty(Model):
    """Rank 1 raises in its second layer when rows are computed at the second meeting."""

    passes = 0

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        self.passes += not self.training and conv is self.convs[1]
        if self.passes == 3 and self.global_rank == 1:
            raise KeyError("a fault")
        return super()._layer(conv, batch)


def failing(rank: int, world_size: int) -> str:
    try:
        quick(averaging()).fit(Faulty(SAGEConv, 3).double(), parts(3))
    except (RuntimeError, KeyError) as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_rank_that_raises_at_a_meeting_is_named() -> None:
    first, second, third = run_ranks(failing, RANKS)
    assert second == "'a fault'"
    for said in (first, third):
        assert "exchanged rows of boundary=History() at a meeting, and rank 1 on " in said


def test_one_rank_knows_all_rows() -> None:
    of_boundaries = []
    for boundary in (lgd.History(), lgd.Isolated()):
        module = model("SAGE", 3)
        trainer(1, averaging(), precision="64-true", limit_val_batches=0).fit(module, parts(3, boundary=boundary))
        of_boundaries.append(weights_of(module))
    assert all(torch.equal(value, of_boundaries[1][key]) for key, value in of_boundaries[0].items())


def test_types_that_a_sampler_leaves_out_are_refused() -> None:
    data = some_data()
    left = {kind: [0, 0] if kind[1] == "cites" else [-1, -1] for kind in data.edge_types}
    with pytest.raises(ValueError, match=r"boundary=History\(\) computes rows by edges of all types, and Neighbor"):
        lgd.PartitionedDataModule(lgd.Graph.from_pyg(data), sampler=lgd.NeighborSampler(left), boundary=lgd.History())


# With types too, local steps read the rows of the last meeting at the boundary.


def part_loss(module: ByLayers, data: HeteroData, inside: dict[str, Tensor], known: list[dict[str, Tensor]]) -> Tensor:
    """The loss of a part: of nodes outside of it, layers read the rows of the last meeting."""
    x = data.x_dict
    for index in range(len(module.convs)):
        x = module.rows(index, x, data.edge_index_dict)
        if index < len(known):
            x = {kind: torch.where(inside[kind][:, None], x[kind], known[index][kind]) for kind in x}
    seeds = inside["paper"] & data["paper"].train_mask
    return functional.cross_entropy(x["paper"][seeds], data["paper"].y[seeds])


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


OF_LAYERS = [(2, lgd.WholePartSampler(2)), (3, lgd.WholePartSampler(3)), (2, lgd.NeighborSampler([-1, -1]))]


@pytest.mark.parametrize(("num_layers", "sampler"), OF_LAYERS)
def test_with_types_too_and_when_resumed_they_are_those_by_hand(num_layers: int, sampler: Any, tmp_path: Path) -> None:
    graph = lgd.Graph.from_pyg(DATA)
    expected = history_by_hand(num_layers, 3, 2, owners(graph, 2).assignment, graph)
    for found in run_ranks(remembered, 2, num_layers, sampler, tmp_path):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **CLOSE)
