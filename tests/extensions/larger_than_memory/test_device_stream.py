"""Batches on their way to a device: in which order things happen, and on a GPU that none is overwritten."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Graph, NeighborSampler, WholePartSampler
from lightning_gnn_dist.batches import pool
from lightning_gnn_dist.batches import source as module
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.global_batches import GlobalBatches
from lightning_gnn_dist.batches.source import DeviceStream, GraphSource, Sent, assemble
from lightning_gnn_dist.engine.lending import PinnedPool
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory.device_sampler import DeviceSampler
from tests.extensions.larger_than_memory.test_device_sampler import on
from tests.loaders import over
from tests.sampling.reference import random_graph

GRAPH = random_graph(300, 3000, seed=1)
CPU = torch.device("cpu")
ELSEWHERE = torch.device("cpu", 0)  # to torch another device than where the batches of these tests are made


class Event(int):
    """The number of what was sent."""

    def query(self) -> bool:
        return True


class Device:
    """In place of CUDA: it writes down what it is asked for, and where."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: set[int] = set()  # addresses
        self.kept: set[int] = set()
        self.moved: list[tuple[bool, bool]] = []  # whether from pinned memory, whether without waiting
        self.stream = "training"
        self.num_events = 0

    def record_event(self) -> Event:
        self.num_events += 1
        self.log.append(f"sent {self.num_events} on {self.stream}")
        return Event(self.num_events)

    def wait_event(self, event: Event) -> None:
        self.log.append(f"waits for {event} on {self.stream}")

    @contextmanager
    def side(self, _: object) -> Iterator[None]:
        before, self.stream = self.stream, "side"
        yield
        self.stream = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake, empty, to = Device(), torch.empty, Tensor.to

    def pin(tensor: Tensor) -> Tensor:
        copy = tensor if tensor.data_ptr() in fake.pinned else tensor.clone()
        fake.pinned.add(copy.data_ptr())
        return copy

    def allocate(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return pin(empty(*size, **options)) if pin_memory else empty(*size, **options)

    def move(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if options.get("device") == ELSEWHERE:
            fake.moved.append((tensor.data_ptr() in fake.pinned, options["non_blocking"]))
        return to(tensor, *args, **options)

    monkeypatch.setattr(module, "_side_stream", lambda _: fake)
    monkeypatch.setattr(module, "pinned_pool", PinnedPool)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", fake.side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: fake)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in fake.pinned)
    monkeypatch.setattr(Tensor, "to", move)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _: fake.kept.add(tensor.data_ptr()))
    return fake


def batches(count: int) -> list[SampledData]:
    keys = [BatchKey(0, 0, i) for i in range(count)]
    samples = NeighborSampler([3, 2]).sample_bulk(GRAPH, [torch.arange(5 * i, 5 * i + 4) for i in range(count)], keys)
    return [assemble(GRAPH, sample) for sample in samples]


def tensors(batch: SampledData) -> list[Tensor]:
    arrays = [value for name, value in batch.to_dict().items() if isinstance(value, Tensor) and name != "edge_index"]
    return [*arrays, batch.blocks[0].indptr, batch.blocks[0].indices]


def test_a_batch_is_sent_while_the_one_before_it_trains(device):
    stream = DeviceStream(ELSEWHERE)
    bulk = stream.load(batches(3))
    assert device.log == ["sent 1 on side"]
    for number in (1, 2, 3):
        stream.receive(bulk)
        device.log.append(f"trains {number}")
    assert not bulk
    assert device.log == [
        "sent 1 on side",
        *("sent 2 on side", "waits for 1 on training", "trains 1"),
        *("sent 3 on side", "waits for 2 on training", "trains 2"),
        *("waits for 3 on training", "trains 3"),
    ]


def test_all_of_a_batch_is_copied_from_pinned_memory_and_kept_for_its_reader(device):
    stream, expected = DeviceStream(ELSEWHERE), batches(1)[0]
    batch = stream.receive(stream.load(batches(1)))
    assert batch._store.is_pending  # nobody built the edges
    assert set(device.moved) == {(True, True)}
    assert {tensor.data_ptr() for tensor in tensors(batch)} <= device.kept
    assert all(mine.equal(other) for mine, other in zip(tensors(batch), tensors(expected), strict=True))


def test_batches_made_on_the_device_are_sent_at_once(device):
    bulk = DeviceStream(CPU).load(batches(3))
    assert all(isinstance(sent, Sent) for sent in bulk)
    assert device.log == ["sent 1 on side", "sent 2 on side", "sent 3 on side"]
    assert not device.pinned


@pytest.mark.parametrize("num_threads", [0, 1, 2])
@pytest.mark.parametrize("sampler", [NeighborSampler([3, 2]), WholePartSampler(2)], ids=repr)
def test_a_loader_hands_out_the_same_batches(device, num_threads, sampler, monkeypatch):
    monkeypatch.setattr(pool, "SMALL_BYTES", 1)
    monkeypatch.setattr(pool, "POOLED_BYTES", 1)
    options: dict[str, Any] = {"seed": 0, "bulk_size": 3, "num_threads": num_threads}
    plain = over(GraphSource(GRAPH, sampler), torch.arange(60), 8, **options)
    source = GraphSource(GRAPH, sampler, stream=DeviceStream(ELSEWHERE))
    sent = over(source, torch.arange(60), 8, **options)
    pairs = list(zip([*plain, *plain], [*sent, *sent], strict=True))
    assert len(pairs) == 16
    for one, other in pairs:
        assert all(mine.equal(theirs) for mine, theirs in zip(tensors(one), tensors(other), strict=True))
        assert one.edge_index.equal(other.edge_index)
    assert device.num_events == 16
    assert {other.x.data_ptr() for _, other in pairs} <= device.kept


@pytest.mark.parametrize("bulk_size", [1, 3])
def test_corrections_come_by_the_same_way(device, bulk_size, monkeypatch):
    monkeypatch.setattr(pool, "SMALL_BYTES", 1)
    monkeypatch.setattr(pool, "POOLED_BYTES", 1)
    sampler, stream = NeighborSampler([3, 2]), DeviceStream(ELSEWHERE)
    plain = GlobalBatches(GraphSource(GRAPH, sampler), torch.arange(60), 8, seed=0, bulk_size=bulk_size)
    sent = replace(plain, source=GraphSource(GRAPH, sampler, stream=stream))
    for one, other in zip(plain.of_round(2, stop=7), sent.of_round(2, stop=7), strict=True):
        assert all(mine.equal(theirs) for mine, theirs in zip(tensors(one), tensors(other), strict=True))
    assert device.num_events == 7
    assert set(device.moved) == {(True, True)}
    assert [line for line in device.log if "waits" in line] == [f"waits for {i} on training" for i in range(1, 8)]


@pytest.mark.gpu
@pytest.mark.parametrize("made_on", ["cpu", "cuda"])
def test_no_batch_changes_while_others_are_made(made_on):
    cuda, sampler = torch.device("cuda", 0), NeighborSampler([10, 10])
    whole = random_graph(20_000, 400_000, seed=1)
    x = torch.arange(20_000.0)[:, None].expand(-1, 128).contiguous()
    graph = Graph(whole.indptr, whole.indices, {"x": x})
    options: dict[str, Any] = {"seed": 0, "bulk_size": 4, "num_threads": 2}
    plain = over(GraphSource(graph, sampler), torch.arange(10_000), 50, **options)
    where, drawn = (graph, sampler) if made_on == "cpu" else (on("cuda:0", graph), DeviceSampler(sampler))
    loader = over(GraphSource(where, drawn, stream=DeviceStream(cuda)), torch.arange(10_000), 50, **options)
    weight, is_right, kept = torch.randn(128, 128, device=cuda), [], []
    for _ in range(3):  # buffers come round
        for batch, same in zip(loader, plain, strict=True):
            for _ in range(20):  # the training stream is behind all the time
                weight = (weight @ weight).tanh()
            is_right.append((batch.x == batch.n_id[:, None]).all())
            kept.append((batch.n_id, same.n_id, batch.edge_index, same.edge_index))
    assert all(map(bool, is_right))
    assert all(ids.cpu().equal(same) and edges.cpu().equal(others) for ids, same, edges, others in kept)
