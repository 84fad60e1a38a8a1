"""The time that training waits for data is logged, whatever the strategy."""

import pytest

from lightning_gnn_dist import Loading, NeighborSampler, PartitionedDataModule, RunReport, communities
from tests.data_fitting import trainer
from tests.sage import SAGE


class Clock:
    """What the loaders read: time that passes only where the classes below say so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


class Slow(NeighborSampler):
    def sample_bulk(self, graph, seeds, keys):
        CLOCK.now += 3.0 * len(seeds)
        return super().sample_bulk(graph, seeds, keys)


class Busy(SAGE):
    def training_step(self, batch):
        CLOCK.now += 1.0
        return super().training_step(batch)


def share(module: SAGE, sampler: NeighborSampler, num_threads: int) -> float:
    graph = communities(400, 4, num_features=12, train_share=0.2)
    data = PartitionedDataModule(
        graph, sampler=sampler, batch_size=10, loading=Loading(num_threads=num_threads, bulk_size=1)
    )
    fit, started = trainer(1, max_epochs=1, callbacks=[RunReport()]), CLOCK.now
    fit.fit(module, data)
    assert 0 <= float(fit.callback_metrics["data/waited_seconds"]) < CLOCK.now - started
    return float(fit.callback_metrics["data/waited_share"])


def test_a_slow_sampler_is_waited_for_and_a_fast_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gnn_dist.batches.batches.time", CLOCK)
    assert share(Busy(12, 4), Slow([2, 2]), num_threads=0) == pytest.approx(3 / 4)
    assert share(Busy(12, 4), NeighborSampler([2, 2]), num_threads=1) == 0.0
