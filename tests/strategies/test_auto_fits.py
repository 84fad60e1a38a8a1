"""``AutoStrategy`` on all kinds of fits: each is, to the bit, that of the strategy that was chosen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_gnn_dist import (
    Graph,
    GrappaStrategy,
    LinkDataModule,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    TemporalSampler,
    save_shards,
    split_edges,
)
from lightning_gnn_dist.strategies.auto import Kept
from lightning_gnn_dist.strategies.choosing.choices import CHOICES, up_to_validation
from lightning_gnn_dist.strategies.choosing.probe import probe
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.link_model import LinkSAGE
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.strategies.test_auto import Told, data
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers


class Norm(SAGE):
    """BatchNorm on the features, and dropout."""

    def __init__(self) -> None:
        super().__init__(12, 4, dropout=0.5)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, batch: Any) -> Tensor:
        batch.x = self.norm(batch.x)
        return super().forward(batch)


class Plateau(SAGE):
    """A schedule by what a validation finds, of which a probe has none."""

    knows_every = False

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
        every = self.trainer.check_val_every_n_epoch if self.knows_every else 1
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss", "frequency": every}}


class Cycle(SAGE):
    """A schedule as long as the fit."""

    def configure_optimizers(self) -> Any:
        optimizer, steps = super().configure_optimizers(), int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByHand(SAGE):
    """An optimizer for each parameter, so that each batch takes six steps."""

    automatic_optimization = False

    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.correction_step(batch))
        for optimizer in optimizers:
            optimizer.step()

    def correction_step(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam([each], lr=0.01) for each in self.parameters()]


def sage(kind: type[SAGE] = SAGE, folder: str = "", **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    return kind() if kind is Norm else kind(12, 4), data(), options


def shards(folder: str) -> tuple[Any, Any, dict[str, Any]]:
    source = PartitionedDataModule(Path(folder) / "shards", sampler=NeighborSampler([4, 4]), batch_size=16, seed=1)
    return SAGE(12, 4), source, {}


def links(folder: str) -> tuple[Any, Any, dict[str, Any]]:
    source = LinkDataModule(split_edges(small_graph(), 0.1, 0.1), sampler=NeighborSampler([4, 4]), batch_size=512)
    return LinkSAGE(12), source, {}


def typed(folder: str, sampler: Any) -> tuple[Any, Any, dict[str, Any]]:
    graph = typed_graph_of_papers()
    source = PartitionedDataModule(graph, sampler=sampler, batch_size=32, seed=1)
    return HeteroSAGE(list(graph.to_pyg().edge_types)), source, {}


def temporal(folder: str) -> tuple[Any, Any, dict[str, Any]]:
    known = small_graph().to_pyg()
    known.time = torch.arange(known.num_nodes)
    source = PartitionedDataModule(Graph.from_pyg(known), sampler=TemporalSampler([4, 4], "time"), batch_size=16)
    return SAGE(12, 4, blocks=False), source, {}


QUICK: dict[str, Callable[..., Any]] = {"plateau": partial(sage, Plateau), "by hand": partial(sage, ByHand)}
SLOW: dict[str, Callable[..., Any]] = {
    "norm and dropout": partial(sage, Norm),
    "cycle": partial(sage, Cycle),
    "clipping": partial(sage, gradient_clip_val=0.1),
    "bfloat16": partial(sage, precision="bf16-mixed"),
    "accumulation": partial(sage, accumulate_grad_batches=2),
    "shards": shards,
    "links": links,
    "types": partial(typed, sampler=NeighborSampler([4, 4])),
    "types and times": partial(typed, sampler=TemporalSampler([4, 4], "time")),
    "times": temporal,
}
CASES = QUICK | SLOW


def fits(rank: int, world_size: int, case: str, folder: str) -> tuple[bool, int]:
    warnings.filterwarnings("ignore", "You defined a `validation_step`")

    def weights(strategy: Any, **lengths: int) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        module, source, options = CASES[case](folder=folder)
        module.knows_every = not isinstance(strategy, Told)
        running = trainer(world_size, strategy, **lengths, **options)
        running.fit(module, source)
        return torch.nn.utils.parameters_to_vector(module.parameters()).detach(), running

    found, chosen = weights(Told("averaging"), max_epochs=40, check_val_every_n_epoch=20)
    lengths = {"max_epochs": chosen.max_epochs, "check_val_every_n_epoch": chosen.check_val_every_n_epoch}
    direct, _ = weights(CHOICES["averaging"].strategy(**PATIENCE), **lengths)
    return found.equal(direct), chosen.max_epochs % chosen.check_val_every_n_epoch


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_fit_of_any_kind_is_that_of_the_choice(case: str, tmp_path: Path) -> None:
    if case == "shards":
        save_shards(small_graph(), MetisPartitioner()(small_graph(), 2, seed=0), tmp_path / "shards")
    assert run_ranks(fits, 2, case, str(tmp_path), timeout=100) == [(True, 0)] * 2


def progress_of(rank: int, world_size: int, case: str, folder: str) -> float | None:
    module, source, options = CASES[case](folder=folder)
    strategy = GrappaStrategy(**PATIENCE)
    return probe(trainer(world_size, strategy, **options), module, source, strategy.launch).measured.progress


@pytest.mark.slow
@pytest.mark.parametrize("case", ["links", "types", "types and times", "times", "accumulation", "by hand"])
def test_progress_is_measured_on_any_kind_but_for_steps_by_hand(case: str, tmp_path: Path) -> None:
    here, there = run_ranks(progress_of, 2, case, str(tmp_path), timeout=100)
    assert here == there and (here is None if case == "by hand" else 0.5 < here < 1.1)


def test_what_ended_with_a_validation_still_does() -> None:
    kept = Kept("averaging", 5)  # rounds of 16 steps
    assert [kept.epochs(passes) for passes in (-1, 1, 40, 100)] == [-1, 1, 13, 32]
    assert up_to_validation(13, 7, (40, 20)) == 14
    assert [up_to_validation(13, 7, before) for before in ((41, 20), (None, 20), (40, None))] == [13] * 3
    assert up_to_validation(-1, 7, (-1, 1)) == -1
