"""The table of docs/batches.md: the form in which each layer of PyG computes on a block, its exactness and its cost."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from torch_geometric import nn
from torch_geometric.data import Data, HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.batches import THREAD_NAME, Batches, Deal, Learning
from lightning_gnn_dist.batches.source import GraphSource, assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.homes.parts import Parts
from lightning_gnn_dist.homes.residency import Plan
from tests.pages import ROOT

GRAPH = lgd.communities(400, 4, num_features=8, train_share=0.1)
GRAPH.edge_arrays["edge_attr"] = torch.rand(GRAPH.num_edges, 3, generator=torch.Generator().manual_seed(0))
WITH_EDGES = ("GINEConv", "NNConv", "GMMConv")
OTHERS: dict[str, Callable[[], Any]] = {
    "GATConv": lambda: nn.GATConv(8, 5, heads=2),
    "GATv2Conv": lambda: nn.GATv2Conv(8, 5, heads=2),
    "TransformerConv": lambda: nn.TransformerConv(8, 5, heads=2),
    "GeneralConv": lambda: nn.GeneralConv(8, 5, heads=2, attention=True),
    "GCNConv(normalize=False)": lambda: nn.GCNConv(8, 5, normalize=False),
    "GINConv": lambda: nn.GINConv(Linear(8, 5)),
    "GINEConv": lambda: nn.GINEConv(Linear(8, 5), edge_dim=3),
    "EdgeConv": lambda: nn.EdgeConv(Linear(16, 5)),
    "PNAConv": lambda: nn.PNAConv(8, 5, ["mean", "max"], ["identity"], deg=torch.tensor([1, 5, 9])),
    "NNConv": lambda: nn.NNConv(8, 5, Linear(3, 40)),
    "GMMConv": lambda: nn.GMMConv(8, 5, dim=3, kernel_size=2),
    "MFConv": lambda: nn.MFConv(8, 5, max_degree=20),
    "ChebConv": lambda: nn.ChebConv(8, 5, K=2),
    "SGConv": lambda: nn.SGConv(8, 5, K=1),
    "TAGConv": lambda: nn.TAGConv(8, 5, K=1),
    "APPNP": lambda: nn.APPNP(1, 0.1),
    "LGConv": nn.LGConv,
    "SimpleConv": nn.SimpleConv,
}
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in re.findall(r"^\| `\w+Conv.*$|^\| `APPNP.*$", (ROOT / "docs" / "batches.md").read_text(), re.MULTILINE)
]
SAID = {name: row[1:] for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.fixture(scope="module")
def batch() -> Any:
    data = lgd.PartitionedDataModule(GRAPH, sampler=lgd.NeighborSampler([-1]), batch_size=20)
    return next(iter(data.train_dataloader()))


def made(name: str) -> Any:
    torch.manual_seed(0)
    return (OTHERS[name] if name in OTHERS else lambda: getattr(nn, name)(8, 5))().eval()


def works(compute: Callable[[], Tensor], expected: Tensor) -> bool:
    with suppress(TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        return torch.allclose(compute()[: len(expected)], expected, rtol=1e-4, atol=1e-5)
    return False


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of GATConv, which makes a matrix anew
@pytest.mark.parametrize("name", SAID)
@torch.no_grad()
def test_a_layer_has_the_form_that_the_table_says(name: str, batch: Any) -> None:
    (block,), conv, seeds = batch.blocks, made(name), batch.n_id[: batch.batch_size]
    x, edges = (batch.x, batch.x[: block.num_dst]), [batch.edge_attr] if name in WITH_EDGES else []
    expected = conv(batch.x, batch.edge_index, *edges)[: batch.batch_size]
    on_edges = works(lambda: conv(x, block.edge_index, *edges), expected)
    on_adj = works(lambda: conv(x, block.adj), expected)
    form = "`block.adj`" if on_adj else "`block.edge_index`" if on_edges else "`batch.edge_index`"
    receivers = torch.arange(GRAPH.num_nodes).repeat_interleave(GRAPH.degrees())
    everything = torch.stack([GRAPH.indices.long(), receivers])
    all_edges = [GRAPH.edge_arrays["edge_attr"]] if edges else []
    whole = conv(GRAPH.node_arrays["x"], everything, *all_edges)[seeds]
    exact = "yes" if torch.allclose(expected, whole, rtol=1e-4, atol=1e-5) else "no"
    is_product = on_adj and conv.inspector.implements("message_and_aggregate")
    cost = "a row for each node" if is_product else "a row for each edge"
    assert [form, exact, cost] == SAID[name]


def test_the_table_has_the_layers_that_most_people_use() -> None:
    assert {"SAGEConv", "GCNConv", "GATConv", "GATv2Conv", "GINConv", "TransformerConv", *OTHERS} <= SAID.keys()


# A batch of a graph without types is one of a graph with one type, but for names and PyG's class.


KIND = ("node", "to", "node")
RANDOM = torch.Generator().manual_seed(0)
ARRAYS = {"x": torch.randn(90, 5, generator=RANDOM).half(), "y": torch.randint(0, 4, (90,), generator=RANDOM)}
EDGES = torch.randint(0, 90, (2, 700), generator=RANDOM)
OF_EDGES = {"edge_index": EDGES, "edge_weight": torch.rand(700, generator=RANDOM)}


def batch_of(data: Any, **how: Any) -> Any:
    graph = lgd.Graph.from_pyg(data, edge_ids=True)
    (sample,) = lgd.NeighborSampler([4, 3]).sample_bulk(graph, [torch.tensor([7, 80, 3])], [BatchKey(0, 0, 0)])
    return assemble(graph, sample, **how)


@pytest.mark.parametrize("how", [{}, {"all_labels": False}, {"widen": False}])
def test_an_untyped_graph_is_one_of_one_type(how: dict[str, Any]) -> None:
    data = HeteroData({"node": ARRAYS, KIND: OF_EDGES})
    ours, typed = batch_of(Data(**OF_EDGES, **ARRAYS), **how), batch_of(data, **how)
    assert isinstance(ours, Data) and isinstance(typed, HeteroData)
    found = {**typed["node"].to_dict(), **typed[KIND].to_dict()}
    assert found.pop("num_nodes") == ours.num_nodes
    assert found.keys() == ours.to_dict().keys()
    for name, value in ours.to_dict().items():
        assert found[name].equal(value) if isinstance(value, Tensor) else found[name] == value, name
    for block, by_type in zip(ours.blocks, typed.blocks, strict=True):
        other = by_type[KIND]
        assert (block.num_dst, block.num_src, block.dtype) == (other.num_dst, other.num_src, other.dtype)
        assert block.indptr.equal(other.indptr) and block.indices.equal(other.indices)
        assert block.weight is not None and block.weight.equal(other.weight)


# The training loader across super-epochs: the same batches however it is read, and nothing left running.


BATCHES, EVERY = 5, 2


def parts(*, in_background: bool = True) -> Parts:
    graph = lgd.communities(400, 4, num_features=4, train_share=0.3, seed=2)
    partition = lgd.RandomPartitioner()(graph, 4, 0)
    plan = Plan(graph, partition, lgd.Holding(lgd.Rotate()), 4, 0)
    return Parts(plan, 1, lgd.Isolated(), lgd.Coverage(), in_background=in_background)


def learning_of(part: lgd.Graph, num_batches: int = BATCHES) -> Learning:
    return Learning(GraphSource(part, lgd.NeighborSampler([3, 3])), Deal(part.split("train"), num_batches, 5))


def loader(source: Parts, *, num_batches: int = BATCHES, weigh: Literal["node", "batch"] = "node") -> Batches:
    return Batches(lambda phase: learning_of(source.at(phase), num_batches), num_batches, every=EVERY, weigh=weigh)


def ids(batches: Any) -> list[list[int]]:
    return [batch.n_id.tolist() for batch in batches]


def test_passes_and_stream_are_the_same_batches() -> None:
    by_pass, streamed = loader(parts()), loader(parts(in_background=False))
    passes = [batch for _ in range(6) for batch in ids(by_pass)]
    assert ids(islice(streamed.stream(0), 6 * BATCHES)) == passes
    assert ids(islice(loader(parts()).stream(13), 12)) == passes[13:25]
    one, other = (loader(parts()) for _ in range(2))
    one.set_epoch(4)
    assert ids(one) == passes[4 * BATCHES : 5 * BATCHES]
    assert ids(other) == passes[:BATCHES]


def test_a_checkpoint_says_where_in_a_pass_it_was_written() -> None:
    whole = loader(parts())
    whole.set_epoch(3)
    expected = ids(whole)
    stopped = loader(parts())
    stopped.set_epoch(3)
    iterator = iter(stopped)
    for _ in range(3):
        next(iterator)
    resumed = loader(parts())
    resumed.load_state_dict(stopped.state_dict())
    started = iter(resumed)  # Lightning makes the iterator before it numbers the pass
    resumed.set_epoch(3)
    assert ids(started) == expected[3:]
    assert resumed.state_dict() == {"batches_done": 0}  # at the end of a pass the next one begins
    resumed.set_epoch(3)
    assert ids(resumed) == expected


def test_a_stream_goes_on_after_a_move_to_its_next_part() -> None:
    expected = ids(islice(loader(parts()).stream(0), 3 * EVERY * BATCHES))
    source = parts()
    ours = loader(source)
    stream = ours.stream(0)
    found = ids(islice(stream, EVERY * BATCHES))
    before = weakref.ref(source.current())
    ours.move_to(EVERY * BATCHES)
    assert source.figures["data/switches"] == 1 and torch.equal(source.current().indices, parts().at(1).indices)
    gc.collect()
    assert before() is None  # the stream does not hold it
    assert found + ids(islice(stream, 2 * EVERY * BATCHES)) == expected
    source.close()


def test_it_moves_to_no_part_without_seeds() -> None:
    source = parts(in_background=False)
    first = source.at(0).indices.clone()

    def make(phase: int) -> Learning:
        part = source.at(phase)
        if not torch.equal(part.indices, first):
            part.node_arrays["train_mask"].zero_()
        return learning_of(part)

    ours = Batches(make, BATCHES, every=EVERY)
    stream = ours.stream(0)
    list(islice(stream, EVERY * BATCHES))
    ours.move_to(EVERY * BATCHES)  # after the last round of a fit
    assert torch.equal(source.current().indices, first)
    with pytest.raises(ValueError, match="no seeds"):
        next(stream)


def test_the_next_part_is_read_in_the_background_and_another_when_it_is_asked_for() -> None:
    source = parts()
    source.at(0)
    source._next[1].result()
    readers: list[str] = []
    source.read = lambda *_: readers.append(threading.current_thread().name)  # type: ignore
    waited = source.figures["data/switch_waited_seconds"]
    source.at(1)  # is there
    assert source.figures["data/switch_waited_seconds"] > waited and source.figures["data/switches"] == 1
    source._next[1].result()
    assert len(readers) == 1 and readers[0].startswith(THREAD_NAME)  # of the one after it
    jumping, expected = parts(), parts(in_background=False).at(2)
    jumping.at(0)
    assert jumping.at(2).node_arrays["n_id"].sort().values.equal(expected.node_arrays["n_id"].sort().values)
    source.close(), jumping.close()


def test_a_failure_in_the_background_reaches_training() -> None:
    source = parts()
    source.at(0)
    source._next[1].result()
    source._boundary = None  # type: ignore[assignment]
    source.at(1)  # is there; the one after it cannot be read
    with pytest.raises(AttributeError):
        source.at(2)
    source.close()


def test_seeds_that_fill_a_pass_up_count_for_nothing() -> None:
    source = parts()
    seeds = source.at(0).split("train").numel()
    ours = loader(source, num_batches=seeds + 3)
    batches = list(ours)
    assert [batch.is_filler for batch in batches] == [False] * seeds + [True] * 3
    assert not any(batch.coverage.any() for batch in batches[seeds:])
    assert copy.copy(batches[-1]).to("cpu").is_filler and pickle.loads(pickle.dumps(batches[-1])).is_filler
    source.close()


def test_batch_level_gives_all_seeds_their_mean() -> None:
    by_node, by_batch = loader(parts()), loader(parts(), weigh="batch")
    for node, batch in zip(by_node, by_batch, strict=True):
        mean = node.coverage[: node.batch_size].mean()
        assert torch.allclose(batch.coverage[: batch.batch_size], mean.expand(batch.batch_size))
