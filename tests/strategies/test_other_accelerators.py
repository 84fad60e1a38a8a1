"""Accelerators that are neither CPU nor CUDA: strategies refuse them before ranks start; one process moves batches."""

from typing import Any

import lightning.fabric.accelerators.mps as of_fabric
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, MPSAccelerator
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.source import stream_to
from lightning_gnn_dist.rounds import meeting, premises
from tests.every_strategy import PATIENCE, every_strategy
from tests.layers.typed_model import some_data
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import State, differs, fit, same_start, state_of

DEVICES = ["mps", "xpu", "hpu", "xla"]
WAY_OUT = "accelerator=.cpu."


def of_kind(kind: str) -> CPUAccelerator:
    """One that finds devices of another kind."""

    class Other(CPUAccelerator):
        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device(kind, 0)] * int(devices)

    return Other()


@pytest.fixture
def a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (MPSAccelerator, of_fabric.MPSAccelerator):
        monkeypatch.setattr(kind, "is_available", staticmethod(lambda: True))


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "mps"])
@pytest.mark.parametrize("name", every_strategy())
def test_strategies_are_refused_on_a_mac(name: str, accelerator: str, a_mac: None) -> None:
    for strategy in (every_strategy()[name](), name):
        with pytest.raises(ValueError, match=WAY_OUT):
            pl.Trainer(accelerator=accelerator, devices=1, strategy=strategy, logger=False)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", every_strategy())
def test_strategies_name_the_device_that_they_refuse(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"Strategy trains on CPUs and on CUDA devices.* on {kind}: .*{WAY_OUT}"):
        pl.Trainer(accelerator=of_kind(kind), devices=2, strategy=every_strategy()[name](), logger=False)


def test_a_mac_without_a_strategy_is_not_refused(a_mac: None) -> None:
    assert pl.Trainer(accelerator="auto", devices=1, logger=False).strategy.root_device == torch.device("mps", 0)


SAMPLERS = [lgd.NeighborSampler([3, 3]), lgd.LadiesSampler([20, 20]), lgd.WholePartSampler(2)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("is_typed", [False, True], ids=["plain", "typed"])
def test_batches_are_moved_whole_and_hold_no_number_that_such_a_device_lacks(sampler: Any, is_typed: bool) -> None:
    if is_typed and isinstance(sampler, lgd.LadiesSampler):
        pytest.skip("draws from graphs without types")
    graph: Any = lgd.communities(200, 3, num_features=5)
    if is_typed:
        graph = some_data()
        graph.apply(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    data = lgd.PartitionedDataModule(graph, sampler=sampler, batch_size=40)
    for stage in ("fit", "test"):
        data.setup(stage)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for batch in loader:
            moved, held = batch.to("meta"), list[Any]()
            moved.apply_(held.append)
            found = [each for each in held if isinstance(each, Tensor)]
            assert {tensor.device.type for tensor in found} == {"meta"}
            assert torch.float64 not in {tensor.dtype for tensor in found}


def test_nothing_of_cuda_is_asked_of_such_a_device() -> None:
    assert stream_to(torch.device("mps", 0)) is None


# Ranks on processors of different kinds, whose results differ in the last digits, have equal replicas all the same.


class Computes(lgd.LocalSGDStrategy):
    """What each rank computes for itself at a meeting comes out differently, by so much."""

    def __init__(self, error: float) -> None:
        super().__init__(lgd.EverySteps(3), average_optimizer=True, **PATIENCE)
        self.error = error

    def end_round(self) -> None:
        super().end_round()
        for parameter in self._module().parameters():
            parameter.data *= 1 + self.error * self.global_rank


def train(rank: int, world_size: int, error: float, processors: list[int]) -> tuple[State, list[str]]:
    premises.processor_of = lambda device: processors[rank]
    said: list[str] = []
    meeting.rank_zero_info = said.append
    module = same_start(optimizer="Adam", batch_norm=True)
    fit(rank, Computes(error), module, devices=world_size)
    return state_of(module), [line for line in said if "processors" in line]


def test_replicas_that_differ_in_the_last_digits_are_those_of_rank_0() -> None:
    by_rank_0 = run_ranks(train, 2, 0.0, [1, 1])[0][0]
    outcomes = run_ranks(train, 2, 1e-6, [1, 2])
    assert [differs(state, by_rank_0) for state, _ in outcomes] == [0.0, 0.0]
    assert len(outcomes[0][1]) == 1 and "all take rank 0's" in outcomes[0][1][0]


@pytest.mark.parametrize(("error", "processors"), [(0.1, [1, 2]), (1e-6, [1, 1])])
def test_what_processors_do_not_explain_is_refused(error: float, processors: list[int]) -> None:
    message = r"replicas of ranks \[1\] differ from that of rank 0, by more than processors of different kinds explain"
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(train, 2, error, processors)
    assert set(caught.value.failures) == {0, 1}
