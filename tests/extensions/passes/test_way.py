"""What is under way to a device and back: in order, waited for only where it takes too many bytes."""

from typing import Any

import pytest
import torch

from lightning_gnn_dist.extensions.passes import forecast
from lightning_gnn_dist.extensions.passes.forecast import Forecast, Memory, bytes_there
from lightning_gnn_dist.extensions.passes.way import UnderWay, WayAndBack
from lightning_gnn_dist.layers.budget import LEAST_BYTES

CUDA = torch.device("cuda", 0)


class Device:
    """In place of CUDA: it is done with the first ``num_done`` things, and writes down what it is waited for."""

    def __init__(self) -> None:
        self.num_done, self.num_launched = 0, 0
        self.waited = list[int]()

    def event(self) -> Any:
        device, self.num_launched = self, self.num_launched + 1
        number = self.num_launched

        class Event:
            def query(self) -> bool:
                return number <= device.num_done

            def synchronize(self) -> None:
                device.waited.append(number)
                device.num_done = max(device.num_done, number)

        return Event()


def test_what_is_under_way_is_waited_for_by_its_bytes() -> None:
    device, under_way = Device(), UnderWay[str](30)
    for name in "abc":
        under_way.add(name, 10, device.event())
        assert list(under_way.done()) == []
    device.num_done = 1
    assert list(under_way.done()) == ["a"]
    under_way.add("d", 20, device.event())
    assert list(under_way.done()) == ["b"]
    assert device.waited == [2], "the oldest alone"
    under_way.add("e", 1_000, device.event())
    assert list(under_way.done()) == ["c", "d", "e"], "more than may be under way"
    assert device.waited == [2, 3, 4, 5]


def test_the_rest_is_waited_for_once() -> None:
    device, under_way = Device(), UnderWay[int](100)
    assert list(under_way.rest()) == []
    for number in range(9):
        under_way.add(number, 1, device.event())
    assert list(under_way.rest()) == [*range(9)]
    assert device.waited == [9]
    assert list(under_way.rest()) == list(under_way.done()) == []


def test_on_a_cpu_nothing_is_under_way() -> None:
    way, rows = WayAndBack(torch.device("cpu"), torch.float64), torch.rand(3, 2)
    assert way.pool is None
    assert way.there(rows) is rows
    assert way.inputs(rows).dtype == torch.float64
    assert way.inputs(torch.arange(3)).dtype == torch.int64
    back = way.back()
    ((nodes, found),) = back.send(torch.arange(3), rows)
    assert nodes.tolist() == [0, 1, 2] and found is rows
    assert list(back.rest()) == []


@pytest.mark.parametrize(
    ("free", "wanted", "expected"),
    [
        (80 << 30, None, 40 << 30),
        (80 << 30, 1 << 30, 1 << 30),
        (80 << 30, 64 << 30, 32 << 30),
        (2 << 30, 8 << 30, 1 << 30),
        (1, None, LEAST_BYTES),
        (1 << 30, LEAST_BYTES, LEAST_BYTES),
    ],
)
def test_bytes_of_a_device(free: int, wanted: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "free_on", lambda device: free)
    assert bytes_there(wanted, CUDA) == expected
    assert bytes_there(wanted, torch.device("cpu")) == bytes_there(wanted, torch.device("mps", 0)) == 0


def test_rows_in_tables_are_no_part_of_a_batch() -> None:
    most = 60_000_000
    forecast = Forecast(100e6, Memory(lambda: 0, lambda: most, lambda: True))
    forecast.begin()
    forecast.end(10e6, 0)
    assert forecast.allowed == pytest.approx(100e6 / 6), "six times what was foreseen"
    most = 45_000_000  # of which tables have 40 MB
    forecast.begin()
    forecast.end(10e6, 40_000_000)
    assert forecast.allowed == pytest.approx(100e6 / 3), "at most half as much as before"
    forecast.was_too_much(10e6)
    assert forecast.allowed <= 10e6 / 2
