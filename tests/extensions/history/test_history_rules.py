"""What rows of meetings cost, what they need, and who is named where a rank does not answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    Elastic,
    EverySeconds,
    EverySteps,
    Graph,
    GrappaStrategy,
    Halo,
    History,
    Holding,
    Isolated,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    Rotate,
    TMAStrategy,
    save_shards,
)
from lightning_gnn_dist.wire.collectives import traffic
from tests.boundary.models import Model, model, weighted_data, weights_of
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.extensions.history.test_history import OWNER, RANKS, STEPS, averaging, parts, quick
from tests.layers.typed_model import some_data
from tests.ranks import run_ranks

# What it sends.


def sent(rank: int, world_size: int) -> list[float]:
    """The bytes of a round with rows of the last meeting, and without."""
    found = []
    for boundary in (History(), Halo()):
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


# What is refused, and who is named.


class WithoutLayers(Model):
    layers = None  # type: ignore[assignment]


class ReadsEdges(Model):
    def forward(self, batch: Any) -> Tensor:
        return self.convs[0](batch.x, batch.edge_index)[: batch.batch_size]


class Normed(Model):
    def __init__(self, kind: Any, num_layers: int) -> None:
        super().__init__(kind, num_layers)
        self.norm = nn.BatchNorm1d(5)


def no_rounds() -> GrappaStrategy:
    return GrappaStrategy(**PATIENCE)


def by_time() -> TMAStrategy:
    return TMAStrategy(EverySeconds(30.0), **PATIENCE)


CHANGING = {"holding": Holding(Rotate(), every=3)}
REFUSED: list[tuple[Any, int, Callable[[], Any], dict[str, Any], str]] = [
    (
        Model,
        3,
        no_rounds,
        {},
        "GrappaStrategy has no meetings: use LocalSGDStrategy(), LLCGStrategy() or TMAStrategy()",
    ),
    (WithoutLayers, 3, averaging, {}, "WithoutLayers does not say what its layers are: define layers()"),
    (ReadsEdges, 3, averaging, {}, "This batch has no edge_index: with boundary=Exchange() ranks send each other rows"),
    (Normed, 3, averaging, {}, "norm (BatchNorm1d) normalises by the rows of all nodes at once"),
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
    strategy = TMAStrategy(EverySteps(STEPS), peers=Elastic())
    with pytest.raises(ValueError, match=r"with peers=Elastic\(\) ranks may die at any time: use boundary=Halo\(\)"):
        trainer(1, strategy).fit(model("SAGE", 3), parts(3))


def test_shards_have_no_rows_of_meetings(tmp_path: Path) -> None:
    graph = small_graph()
    save_shards(graph, RandomPartitioner()(graph, 2, 0), tmp_path / "shards")
    with pytest.raises(ValueError, match=r"boundary must be .* for shards, got History\(every='round'\)"):
        PartitionedDataModule(tmp_path / "shards", boundary=History())


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
    for boundary in (History(), Isolated()):
        module = model("SAGE", 3)
        trainer(1, averaging(), precision="64-true", limit_val_batches=0).fit(module, parts(3, boundary=boundary))
        of_boundaries.append(weights_of(module))
    assert all(torch.equal(value, of_boundaries[1][key]) for key, value in of_boundaries[0].items())


def test_types_that_a_sampler_leaves_out_are_refused() -> None:
    data = some_data()
    left = {kind: [0, 0] if kind[1] == "cites" else [-1, -1] for kind in data.edge_types}
    with pytest.raises(ValueError, match=r"boundary=History\(\) computes rows by edges of all types, and Neighbor"):
        PartitionedDataModule(Graph.from_pyg(data), sampler=NeighborSampler(left), boundary=History())
