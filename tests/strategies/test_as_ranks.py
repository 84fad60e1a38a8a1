"""One curve on any number of ranks: a run as of four ranks is the same on one, two, three and four."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    AsRanks,
    Fetch,
    Graph,
    Halo,
    Holding,
    Isolated,
    LinkDataModule,
    LLCGStrategy,
    Loading,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    RandomPartitioner,
    WholePartSampler,
    citations,
    communities,
    split_edges,
)
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sampling.neighbor import KeyedByName
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.weighted_fitting import grappa

LEARNERS = 4
STEPS = 27  # three passes; the largest chunk has nine batches of at most nine seeds
TOLERANCE = 1e-12


def graph() -> Graph:
    made = communities(240, 4, num_features=8, train_share=0.4, seed=1)
    made.node_arrays["x"] = made.node_arrays["x"].double()
    made.node_arrays["n_id"] = torch.arange(240).flip(0)  # as a graph has that was put into another order
    return made


def chunks() -> Partition:
    """Parts of unequal size."""
    return Partition(torch.arange(240).mul(7).remainder(11).clamp(max=LEARNERS - 1).int(), LEARNERS)


class Model(pl.LightningModule):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([SAGEConv(8, 16), SAGEConv(16, 4)]).double()
        self.dropout = dropout
        self.losses: list[float] = []

    def forward(self, batch: Any) -> Tensor:
        x = self.convs[0](batch.x, batch.edge_index).relu()
        x = functional.dropout(x, self.dropout, self.training)
        return self.convs[1](x, batch.edge_index)[: batch.batch_size]

    def training_step(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch: Any) -> None:
        loss = functional.cross_entropy(self(batch), batch.y[: batch.batch_size])
        self.log("val_loss", loss, batch_size=batch.batch_size, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics.get("val_loss", 0.0)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Scheduled(Model):
    """Asks how many steps there will be, for which Lightning makes the loader before it reads a checkpoint."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        assert steps == STEPS
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data_of(boundary: Boundary, **options: Any) -> PartitionedDataModule:
    defaults: dict[str, Any] = {
        "partitioner": chunks(),
        "sampler": NeighborSampler([3, 2]),
        "batch_size": 9,
        "seed": 3,
        "holding": Holding(AsRanks(LEARNERS)),
        "boundary": boundary,
        "loading": Loading(bulk_size=3),
    }
    return PartitionedDataModule(graph(), **(defaults | options))


def trained(
    boundary: Boundary, devices: int, path: Any = None, kind: type[Model] = Model, **options: Any
) -> tuple[State, list[float], int]:
    module, runner = kind(), trainer(devices, grappa(), **({"max_epochs": 3} | options))
    runner.fit(module, data_of(boundary), ckpt_path=path)
    assert runner.accumulate_grad_batches == 1  # given back
    return state_of(module), module.losses, runner.global_step


def both(rank: int, world_size: int) -> list[tuple[State, list[float], int]]:
    return [trained(boundary, world_size) for boundary in (Fetch(), Halo(2))]


def test_the_curve_is_the_same_on_any_number_of_ranks() -> None:
    of_one = run_ranks(both, 1)[0]
    assert differs(of_one[0][0], of_one[1][0]) < TOLERANCE  # the halo shows all
    for world_size in (3, 4):
        for found in run_ranks(both, world_size):
            for (state, losses, steps), (alone, alone_losses, alone_steps) in zip(found, of_one, strict=True):
                assert steps == alone_steps == STEPS
                assert differs(state, alone) < TOLERANCE
                assert losses == pytest.approx(alone_losses, abs=TOLERANCE)


def by_hand() -> list[Tensor]:
    """One pass of plain Adam: a step goes down the mean loss of the seeds of four batches, one of each chunk."""
    whole, model = graph(), Model(dropout=0.0)
    optimizer, of_chunk = model.configure_optimizers(), chunks().assignment
    index = torch.stack([whole.indices.long(), torch.arange(240).repeat_interleave(whole.indptr.diff())])
    loader = data_of(Fetch(), sampler=NeighborSampler([-1, -1])).train_dataloader()
    for batches in zip(*[iter(loader)] * LEARNERS, strict=True):
        for number, batch in enumerate(batches):
            assert bool((of_chunk[239 - batch.n_id[: batch.batch_size]] == number).all())
        seeds = torch.cat([239 - batch.n_id[: batch.batch_size] for batch in batches if not batch.is_filler])
        hidden = model.convs[0](whole.node_arrays["x"], index).relu()
        rows = model.convs[1](hidden, index)[seeds]
        optimizer.zero_grad()
        functional.cross_entropy(rows, whole.node_arrays["y"][seeds]).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def without_dropout(rank: int, world_size: int) -> list[Tensor]:
    module = Model(dropout=0.0)
    data = data_of(Halo(2), sampler=NeighborSampler([-1, -1]))
    trainer(world_size, grappa(), max_epochs=1).fit(module, data)
    return [parameter.detach() for parameter in module.parameters()]


def test_a_step_goes_down_the_mean_over_the_seeds_of_all_learners() -> None:
    expected = by_hand()
    for found in run_ranks(without_dropout, 3):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


class SavesOnce(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 6 and trainer.fit_loop.epoch_loop.batch_progress.current.ready % 6 == 0:
            trainer.save_checkpoint(self.path)


def stops(rank: int, world_size: int, path: Path) -> State:
    return trained(Halo(2), world_size, kind=Scheduled, callbacks=[SavesOnce(path)])[0]


def goes_on(rank: int, world_size: int, path: Path) -> tuple[State, int]:
    state, _, steps = trained(Halo(2), world_size, path, Scheduled)
    return state, steps


@pytest.mark.parametrize("ranks", [(4, 2), (1, 3)], ids=str)
def test_a_checkpoint_in_mid_pass_goes_on_with_other_ranks(ranks: tuple[int, int], tmp_path: Path) -> None:
    whole = run_ranks(stops, ranks[0], tmp_path / "mid.ckpt")[0]
    for state, steps in run_ranks(goes_on, ranks[1], tmp_path / "mid.ckpt"):
        assert steps == STEPS
        assert differs(state, whole) < TOLERANCE


def test_a_checkpoint_of_other_learners_is_refused(tmp_path: Path) -> None:
    trained(Fetch(), 1, callbacks=[SavesOnce(tmp_path / "four.ckpt")], max_epochs=1)
    others = data_of(Fetch(), holding=Holding(AsRanks(2)), partitioner=RandomPartitioner())
    with pytest.raises(ValueError, match=r"is of a fit with AsRanks\(4\), and AsRanks\(2\) takes other steps: give"):
        trainer(1, grappa(), max_epochs=2).fit(Model(), others, ckpt_path=tmp_path / "four.ckpt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"boundary": Isolated()}, r"AsRanks\(num_ranks=4\) needs .*Isolated\(\) hides .* use boundary=Halo\(2\)"),
        ({"boundary": Halo(1)}, r"boundary=Halo\(\) hides some of what seeds would see: use boundary=Halo\(2\)"),
        ({"boundary": Halo(2, bytes=10**6)}, r"hides some of what seeds would see"),
        ({"sampler": WholePartSampler(2)}, r"takes a NeighborSampler without shared draws .* WholePartSampler"),
        ({"sampler": NeighborSampler([3, 2], shared=True)}, r"takes a NeighborSampler without shared draws"),
        ({"loading": Loading(sample_on="device")}, r'sample_on="device": use these, or boundary=Fetch\(\)'),
    ],
)
def test_what_would_depend_on_the_ranks_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        data_of(**({"boundary": Halo(2)} | options))


def test_links_are_refused() -> None:
    split = split_edges(graph())
    with pytest.raises(ValueError, match=r"AsRanks\(num_ranks=4\) is for nodes: leave it out of a LinkDataModule"):
        LinkDataModule(split, holding=Holding(AsRanks(LEARNERS)))


def weighted() -> Graph:
    made = communities(240, 4, num_features=8, seed=2)
    made.edge_arrays["w"] = torch.rand(made.num_edges, generator=torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize(
    ("made", "sampler"),
    [
        (lambda: citations(600), NeighborSampler([2, 2])),
        (weighted, NeighborSampler([3, 2], weight="w")),
        (weighted, NeighborSampler([3, 2], weight="w", replace=True)),
        (weighted, NeighborSampler([4, -1], replace=True)),
    ],
    ids=["typed", "weighted", "weighted, replaced", "replaced"],
)
def test_a_part_draws_what_the_whole_graph_draws(made: Callable[[], Graph], sampler: NeighborSampler) -> None:
    whole = made()
    data = PartitionedDataModule(whole, partitioner=RandomPartitioner(), sampler=sampler, boundary=Halo(2))
    part, key = data.part(1, 3), BatchKey(5, 1, 2)
    names, seeds = part.node_arrays["n_id"], part.split("train")[:20]
    (of_part,) = KeyedByName(sampler, names).sample_bulk(part, [seeds], [key])
    (of_whole,) = sampler.sample_bulk(whole, [names[seeds]], [key])
    assert torch.equal(names[of_part.nodes], of_whole.nodes)
    assert torch.equal(of_part.indices, of_whole.indices) and torch.equal(of_part.indptr, of_whole.indptr)


def test_more_ranks_than_learners_and_empty_learners_are_refused() -> None:
    with pytest.raises(ValueError, match=r"AsRanks\(2\) divides a step among 2 learners, and there are 3 ranks"):
        AsRanks(2).num_chunks(3)
    empty = Partition(torch.arange(240).remainder(2).int(), LEARNERS)
    with pytest.raises(ValueError, match=r"The chunks of rank 2 of 4 hold none of the \d+ training nodes"):
        trainer(1, grappa(), max_epochs=1).fit(Model(), data_of(Fetch(), partitioner=empty))


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        ("auto", {}, r"weighs the batches of a step by their seeds, which SingleDeviceStrategy does not"),
        (LLCGStrategy(**PATIENCE), {}, r"which LLCGStrategy does not: use Trainer\(strategy=GrappaStrategy\(\)\)"),
        (grappa(), {"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2 does so, too: leave it out"),
        (grappa(), {"limit_train_batches": 5}, r"limit_train_batches=5 may end a pass within one: use max_steps"),
    ],
)
def test_what_ends_a_step_elsewhere_is_refused(strategy: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trainer(1, strategy, max_epochs=1, **options).fit(Model(), data_of(Fetch()))
