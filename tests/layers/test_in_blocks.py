"""Layers that compute block by block learn what they learn on all nodes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import Graph, Halo, History, WholePartSampler
from lightning_gnn_dist.batches.assembling import assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.layers import rows_in_place
from lightning_gnn_dist.layers.in_blocks import _InBlocks
from tests.boundary.models import (
    MODELS,
    Model,
    Normed,
    Weights,
    check_learned,
    learned_by_hand,
    model,
    weighted_data,
    weights_of,
)
from tests.boundary.test_exchange import data_of, quick
from tests.boundary.test_whole_graph import CLOSE, DATA, by_hand, exchanges, fit
from tests.every_strategy import every_strategy
from tests.layers.models import graph_of
from tests.layers.typed_model import ByLayers
from tests.ranks import run_ranks

SMALL, SOME = 6_000, 60_000  # bytes, of which a block may have half, and rows of all nodes an eighth or less


def learned(sampler: WholePartSampler, name: str) -> tuple[Weights, Any]:
    module = model(name, 3)
    quick(1, "auto", max_epochs=3).fit(module, data_of(graph_of(weighted_data()), sampler=sampler))
    return weights_of(module), module


@pytest.mark.parametrize("name", [*MODELS, "PyG GCN", "PyG JK"])
def test_one_process_learns_what_it_does_on_all_nodes_at_once(name: str) -> None:
    found, _ = learned(WholePartSampler(3, bytes=SOME), name)
    for key, value in learned_by_hand(name, 3, weighted_data(), 3).items():
        torch.testing.assert_close(found[key], value, **CLOSE)


def one_batch(sampler: WholePartSampler) -> Any:
    data = graph_of(weighted_data())
    return assemble(data, sampler.sample_bulk(data, [data.split("train")], [BatchKey(0, 0, 0)])[0])


def gradients(module: Any, batch: Any) -> list[Tensor]:
    module.zero_grad()
    functional.cross_entropy(module(batch), batch.y[: batch.batch_size]).backward()
    return [weight.grad.cpu().clone() for weight in module.parameters()]


def test_blocks_are_small_and_rows_that_take_much_memory_are_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, counts, files = one_batch(WholePartSampler(3, bytes=SMALL)).apply(_double), list[int](), list[int]()
    rows, memmap = _InBlocks.rows, np.memmap

    def counting(self: _InBlocks, view: Any, ranges: Any, inputs: Any) -> Any:
        counts.append(ranges[0][1] - ranges[0][0])
        return rows(self, view, ranges, inputs)

    def noting(*args: Any, **options: Any) -> Any:
        files.append(options["shape"][0])
        return memmap(*args, **options)

    monkeypatch.setattr(_InBlocks, "rows", counting)
    monkeypatch.setattr(np, "memmap", noting)
    module = model("SAGE", 3)
    in_files, computed = gradients(module, batch), [block.num_dst for block in batch.blocks]
    assert 90 > computed[0] >= computed[1] > computed[2] == batch.batch_size
    # Forward and, after one node that tells the width of each layer's rows, backward.
    assert sum(counts) == 2 * sum(computed) + 3
    assert max(counts) < 90 // 4
    assert max(files) == computed[0] * 5 * 8 and len(files) >= 4, "rows behind two layers, and their gradients"
    counts.clear(), files.clear()
    at_once = gradients(module, one_batch(WholePartSampler(3, bytes=10**9)).apply(_double))
    assert sorted(counts)[3:] == sorted(computed * 2) and not files
    plain = gradients(module, one_batch(WholePartSampler(3)).apply(_double))
    for found in zip(in_files, at_once, plain, strict=True):
        torch.testing.assert_close(found[0], found[2], **CLOSE)
        torch.testing.assert_close(found[1], found[2], **CLOSE)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class Squared(torch.autograd.Function):
    """A function of the user's own, which torch asks nothing before it gives it rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows * rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Reads(Model):
    """Reads the rows of senders in many ways: sums and means in place, the others as copies."""

    def __init__(self, ways: str) -> None:
        super().__init__(lambda a, b: nn.Linear(len(ways.split()) * a, b), 2)
        self.ways = ways.split()

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        (block,), x = batch.blocks, batch.x
        assert x.shape == (block.num_src, x.size(1)) and len(x) == batch.num_nodes
        found = {
            "sum": lambda: block.adj @ x,
            "mean": lambda: torch.sparse.mm(block.adj, x, "mean"),
            "weighted": lambda: torch.sparse.mm(block.weighted_adj, x),
            "maximum": lambda: torch.sparse.mm(block.adj, x, "amax"),
            "messages": lambda: torch.zeros_like(x[: block.num_dst]).index_add(
                0, block.edge_index[1], x.tanh()[block.edge_index[0]]
            ),
            "squared": lambda: block.adj @ Squared.apply(x),
            "own": lambda: x[: block.num_dst],
        }
        return self._between(conv, conv(torch.cat([found[way]() for way in self.ways], 1)))

    def whole(self, data: Data) -> Tensor:
        adj, weighted = torch.zeros(2, data.num_nodes, data.num_nodes, dtype=torch.float64)
        adj.index_put_((data.edge_index[1], data.edge_index[0]), torch.ones(1).double(), accumulate=True)
        weighted.index_put_((data.edge_index[1], data.edge_index[0]), data.edge_weight, accumulate=True)
        x = data.x
        for conv in self.convs:
            of_senders = x.expand(len(x), *x.shape).masked_fill(adj[:, :, None] == 0, -torch.inf).amax(1)
            found = {
                "sum": adj @ x,
                "mean": adj @ x / adj.sum(1, keepdim=True).clamp(min=1),
                "weighted": weighted @ x,
                "maximum": of_senders.masked_fill(of_senders == -torch.inf, 0.0),
                "messages": adj @ x.tanh(),
                "squared": adj @ x.square(),
                "own": x,
            }
            x = self._between(conv, conv(torch.cat([found[way] for way in self.ways], 1)))
        return x


IN_PLACE = ["sum own", "mean sum mean", "weighted own sum"]


@pytest.mark.parametrize("ways", [*IN_PLACE, "messages", "maximum own", "squared sum own messages mean"])
def test_a_layer_may_read_its_senders_in_any_way(ways: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ways in IN_PLACE:
        monkeypatch.setattr(rows_in_place, "_copy", lambda rows: pytest.fail("rows are copied"))
    data, module = weighted_data(), Reads(ways).double()
    found = gradients(module, one_batch(WholePartSampler(2, bytes=SMALL)).apply(_double))
    loss = functional.cross_entropy(module.whole(data)[data.train_mask], data.y[data.train_mask])
    for mine, by_hand_ in zip(found, torch.autograd.grad(loss, list(module.parameters())), strict=True):
        torch.testing.assert_close(mine, by_hand_, **CLOSE)


def test_messages_take_more_blocks_than_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, rows = list[int](), _InBlocks.rows

    def counting(self: _InBlocks, view: Any, ranges: Any, inputs: Any) -> Any:
        counts[-1] += 1
        return rows(self, view, ranges, inputs)

    monkeypatch.setattr(_InBlocks, "rows", counting)
    for ways in ("sum", "maximum", "messages"):  # rows of senders stay where they are, are copied, make messages
        counts.append(0)
        gradients(Reads(ways).double(), one_batch(WholePartSampler(2, bytes=SOME)).apply(_double))
    assert counts[0] < counts[1] < counts[2]


class Drops(Model):
    """Notes what its dropout lets through, by node."""

    def __init__(self) -> None:
        super().__init__(SAGEConv, 2)
        self.drawn: list[tuple[Tensor, Tensor]] = []

    def _between(self, conv: Any, x: Tensor) -> Tensor:
        return x

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        rows = super()._layer(conv, batch)
        mask = functional.dropout(torch.ones_like(rows))
        self.drawn.append((batch.n_id[: batch.batch_size].clone(), mask))
        return rows * mask


def test_dropout_is_the_same_in_the_backward_pass() -> None:
    data, module = weighted_data(), Drops().double()
    batch = one_batch(WholePartSampler(2, bytes=SMALL)).apply(_double)
    torch.manual_seed(3)
    found = gradients(module, batch)
    after = torch.rand(1)
    masks = [torch.zeros(data.num_nodes, width, dtype=torch.float64) for width in (5, 3)]
    times = torch.zeros(2, data.num_nodes)
    of_layers = [[drawn for drawn in module.drawn if drawn[1].shape[1] == width] for width in (5, 3)]
    for layer, (_, *drawn) in enumerate(of_layers):  # the first one tells the width
        for nodes, mask in drawn:
            is_again = times[layer, nodes] > 0
            assert torch.equal(masks[layer][nodes][is_again], mask[is_again])
            masks[layer][nodes], times[layer, nodes] = mask, times[layer, nodes] + 1
    needed = batch.n_id[: batch.blocks[0].num_dst]
    assert bool((times[0][needed] == 2).all()) and bool((times[1][data.train_mask] == 2).all())
    x = data.x
    for conv, mask in zip(module.convs, masks, strict=True):
        x = conv(x, data.edge_index) * mask
    loss = functional.cross_entropy(x[data.train_mask], data.y[data.train_mask])
    for mine, by_hand_ in zip(found, torch.autograd.grad(loss, list(module.parameters())), strict=True):
        torch.testing.assert_close(mine, by_hand_, **CLOSE)
    torch.manual_seed(3)
    with torch.no_grad():
        module(batch)
    assert torch.equal(torch.rand(1), after), "the backward pass leaves random numbers as they are"


@pytest.mark.gpu
def test_a_device_computes_what_a_cpu_does() -> None:
    module, batch = model("SAGE", 3), one_batch(WholePartSampler(3, bytes=SOME)).apply(_double)
    expected = gradients(module, batch)
    found = gradients(module.cuda(), batch.to("cuda"))
    for mine, of_cpu in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, of_cpu, **CLOSE)


# On several ranks, with every strategy, with types.


def in_small_blocks(num_layers: int, data: Data, world_size: int) -> dict[str, Any]:
    return {**exchanges(num_layers, data, world_size), "sampler": WholePartSampler(num_layers, bytes=SOME)}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 5])
def test_an_exchange_in_blocks_loses_nothing(world_size: int) -> None:
    data, cases = weighted_data(), [("GCN", 3), ("PyG GCN", 3), ("SAGE", 1)]
    check_learned(cases, run_ranks(fit, world_size, data, cases, {"data": in_small_blocks}), 3)


def resumed(rank: int, world_size: int, folder: Path, name: str) -> list[Weights]:
    """With all nodes at once, and in blocks, stopped half-way."""
    found, boundary = [], History() if name == "local_sgd" else Halo(1)
    for num_bytes, epochs, path in ((None, 4, None), (SOME, 2, None), (SOME, 4, folder / "half.ckpt")):
        module, sampler = model("PyG GCN", 2), WholePartSampler(2, bytes=num_bytes)
        running = quick(world_size, every_strategy(1)[name](), max_epochs=epochs)
        running.fit(module, data_of(graph_of(weighted_data()), sampler=sampler, boundary=boundary), ckpt_path=path)
        if epochs == 2:
            running.save_checkpoint(folder / "half.ckpt")
        found.append(weights_of(module))
    return [found[0], found[2]]


@pytest.mark.parametrize("name", ["llcg", *(pytest.param(n, marks=pytest.mark.slow) for n in ("local_sgd", "grappa"))])
def test_every_strategy_learns_the_same_in_blocks(name: str, tmp_path: Path) -> None:
    for at_once, in_small in run_ranks(resumed, 2, tmp_path, name):
        for key, value in at_once.items():
            torch.testing.assert_close(in_small[key], value, **CLOSE)


class BySums(ByLayers):
    """On matrices, in the place of messages."""

    def layers(self) -> Any:
        def layer(batch: Any, index: int) -> dict[str, Tensor]:
            own = {kind: rows[: batch[kind].batch_size] for kind, rows in batch.x_dict.items()}
            rows = {kind: self.own[index][kind](some) for kind, some in own.items()}
            for (sender, name, receiver), block in batch.blocks[0].items():
                conv, some = self.convs[index].convs[sender, name, receiver], batch[sender].x
                pair = some, own[receiver]
                rows[receiver] = rows[receiver] + conv(pair, block.adj)
                self.called.append({receiver: len(own[receiver])})
            return rows if index == len(self.convs) - 1 else {kind: some.tanh() for kind, some in rows.items()}

        return [lambda batch, index=index: layer(batch, index) for index in range(len(self.convs))]


@pytest.mark.parametrize("kind", [ByLayers, BySums])
def test_a_graph_with_types_is_learned_alike(kind: Any) -> None:
    graph, module = Graph.from_pyg(DATA), kind(DATA.edge_types, 3)
    data = data_of(graph, sampler=WholePartSampler(3, bytes=10 * SOME))
    run = quick(1, "auto", max_epochs=2)
    run.fit(module, data)
    assert len(module.called) > 2 * 3 * 4, "in several blocks"
    for key, value in by_hand(3, 2).items():
        torch.testing.assert_close(weights_of(module)[key], value, **CLOSE)


# What is refused.


class Writes(Model):
    def __init__(self) -> None:
        super().__init__(SAGEConv, 2)

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        batch.degree = batch.blocks[0].indptr.diff()
        return super()._layer(conv, batch)


class Encodes(Model):
    def __init__(self) -> None:
        super().__init__(SAGEConv, 2)
        self.first = nn.Linear(6, 6)

    def forward(self, batch: Any) -> Tensor:
        batch.x = self.first(batch.x)
        return super().forward(batch)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Normed, r"norm \(BatchNorm1d\) normalises by the rows of all nodes at once.*leave bytes out"),
        (Writes, r"Layer 0 of layers\(\) has written degree into its batch"),
        (Encodes, r"batch.x requires a gradient, and WholePartSampler\(bytes=...\) computes layers again"),
    ],
)
def test_what_blocks_would_change_is_refused(kind: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind().double()(one_batch(WholePartSampler(2, bytes=SOME)).apply(_double))
