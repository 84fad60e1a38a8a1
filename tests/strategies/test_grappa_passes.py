"""Passes of Grappa: every training node is a seed once an epoch, and ranks take the same number of steps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import lightning_gnn_dist as lgd
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, State, batches, differs, fit, state_of
from tests.strategies.weighted_fitting import Model, data_of, graph, grappa, trainer_of

# Every training node is a seed once an epoch, and ranks take the same number of steps.


def few_labels(rank: int, world_size: int) -> tuple[list[list[int]], int, State]:
    source = graph()
    seeds = source.split("train")
    lone = torch.zeros(600, dtype=torch.int32)
    lone[seeds[:3]] = 1  # rank 1 has three seeds, rank 0 all others
    module = Model()
    trainer = trainer_of(world_size, grappa())
    options = {"coverage": None, "batch_size": 20, "sampler": lgd.NeighborSampler([4, 4])}
    trainer.fit(module, data_of(source, partitioner=lgd.Partition(lone, 2), **options))
    counted = [ids.tolist() for ids, is_filler in module.seen if not is_filler]
    return counted, len(module.seen), state_of(module)


def test_a_rank_with_few_seeds_fills_up_with_steps_that_count_for_nothing() -> None:
    (first, steps, state), (second, other_steps, other) = run_ranks(few_labels, 2)
    assert steps == other_steps == 2 * len(first) // 2
    assert differs(state, other) == 0.0
    per_epoch = sorted(node for ids in first[: len(first) // 2] + second[: len(second) // 2] for node in ids)
    assert per_epoch == graph().split("train").tolist()


class Logs(Model):
    """Logs its loss as docs/evaluation.md says, and remembers what it has logged."""

    def training_step(self, batch: Any) -> Tensor:
        losses = functional.cross_entropy(self(batch), batch.y[: batch.batch_size], reduction="none")
        if not batch.is_filler:
            self.log("of_seeds", losses.mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(losses))
            self.seen.append((losses.detach(), False))
        return losses.mean()


def logged(rank: int, world_size: int) -> tuple[Tensor, float]:
    """Five seeds on one rank and one on the other, which fills four batches up."""
    source = graph()
    seeds = source.split("train")
    source.node_arrays["train_mask"] = torch.zeros(600, dtype=torch.bool).index_fill_(0, seeds[:6], True)
    sides = lgd.Partition(torch.zeros(600, dtype=torch.int32).index_fill_(0, seeds[:1], 1), 2)
    module = Logs()
    trainer = trainer_of(world_size, grappa(), max_epochs=1)
    trainer.fit(module, data_of(source, partitioner=sides, batch_size=1))
    return torch.cat([losses for losses, _ in module.seen]), float(trainer.logged_metrics["of_seeds"])


def test_what_is_logged_without_fillers_is_the_mean_over_all_seeds() -> None:
    (first, mean), (second, other) = run_ranks(logged, 2)
    assert (len(first), len(second)) == (5, 1)
    assert mean == other == pytest.approx(float(torch.cat([first, second]).mean()))


def rotating(rank: int, world_size: int, residency: Any) -> list[list[int]]:
    module = Model()
    data = data_of(holding=lgd.Holding(residency, every=2), batch_size=40, loading=lgd.Loading(num_threads=1))
    trainer = trainer_of(world_size, grappa(), max_epochs=6)
    trainer.fit(module, data)
    steps = len(module.seen) // 6
    return [torch.cat([ids for ids, _ in module.seen[e * steps : (e + 1) * steps]]).tolist() for e in range(6)]


@pytest.mark.parametrize("residency", [lgd.Rotate(), pytest.param(lgd.Redeal(30), marks=pytest.mark.slow)], ids=repr)
def test_every_training_node_is_a_seed_once_an_epoch(residency: Any) -> None:
    everyone = graph().split("train").tolist()
    epochs = list(zip(*run_ranks(rotating, 3, residency), strict=True))
    for ranks in epochs:
        assert sorted(node for ids in ranks for node in ids) == everyone
    same = [set(epochs[0][rank]) == set(epochs[2][rank]) for rank in range(3)]
    assert all(same) == isinstance(residency, lgd.Rotate)


# What is refused.


def uneven_loaders(rank: int, world_size: int) -> None:
    fit(rank, grappa(), Net(), devices=world_size, train=batches(rank, count=4 + rank))


def test_loaders_of_different_length_are_refused_on_all_ranks() -> None:
    with pytest.raises(RankError, match=r"\[4, 5\]") as error:
        run_ranks(uneven_loaders, 2)
    assert sorted(error.value.failures) == [0, 1]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


def endless_loader(rank: int, world_size: int, strategy: Any) -> None:
    fit(rank, strategy(**PATIENCE), Net(), devices=world_size, train=DataLoader(Endless()))


@pytest.mark.parametrize(
    ("strategy", "message"), [(lgd.GrappaStrategy, "not say how many it has"), (lgd.LocalSGDStrategy, "with a length")]
)
def test_a_loader_without_a_length_is_refused(strategy: Any, message: str) -> None:
    with pytest.raises(RankError, match=message) as error:
        run_ranks(endless_loader, 2, strategy)
    assert sorted(error.value.failures) == [0, 1]
