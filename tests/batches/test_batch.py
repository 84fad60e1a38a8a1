"""A batch behaves like any PyG Data, whoever looks at it and however."""

import copy
import pickle

import pytest
import torch
from torch_geometric import transforms as T
from torch_geometric.data import Batch, Data
from torch_geometric.utils import trim_to_layer

from lightning_gnn_dist import Graph, NeighborSampler, WholePartSampler
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.convert import quantize_rows
from lightning_gnn_dist.sampling.base import Sampler
from tests.sampling.reference import random_graph

GRAPH = random_graph(200, 1500, seed=2)
SEEDS = torch.tensor([4, 190, 7, 60, 33])
SAMPLER = NeighborSampler([4, 3])


def make_batch(sampler: Sampler = SAMPLER, graph: Graph = GRAPH) -> SampledData:
    return assemble(graph, sampler.sample_bulk(graph, [SEEDS], [BatchKey(0, 0, 0)])[0])


@pytest.fixture
def batch() -> SampledData:
    return make_batch()


@pytest.fixture
def plain() -> Data:
    """The same batch as an ordinary Data."""
    data = Data()
    for name, value in make_batch().to_dict().items():
        data[name] = value
    return data


def is_pending(batch: SampledData) -> bool:
    return bool(batch._store.is_pending)


def test_edge_arrays_stand_in_the_order_of_edge_index(batch):
    receivers = torch.arange(200).repeat_interleave(GRAPH.degrees())
    known = torch.cat([torch.stack([GRAPH.indices, receivers], 1), GRAPH.edge_arrays["edge_attr"]], 1)
    found = torch.cat([batch.n_id[batch.edge_index].t(), batch.edge_attr], 1)
    assert set(map(tuple, found.tolist())) <= set(map(tuple, known.tolist()))


def test_ids_of_a_part_are_global(batch):
    part = GRAPH.induced(torch.arange(50, 150))
    sample = NeighborSampler([3]).sample_bulk(part, [torch.tensor([2, 9])], [BatchKey(0, 0, 0)])[0]
    data = assemble(part, sample)
    assert data.n_id.equal(sample.nodes + 50)
    assert data.x.equal(GRAPH.node_arrays["x"][data.n_id])


@pytest.mark.parametrize(
    "read",
    [
        lambda batch: batch.edge_index,
        lambda batch: batch["edge_index"],
        lambda batch: batch._store.edge_index,
        lambda batch: batch.get("edge_index"),
        lambda batch: batch.to_dict()["edge_index"],
        lambda batch: batch.to_namedtuple().edge_index,
        lambda batch: dict(batch)["edge_index"],
        lambda batch: dict(batch._store.items())["edge_index"],
        lambda batch: next(iter(batch._store.values("edge_index"))),
        lambda batch: copy.copy(batch).edge_index,
        lambda batch: copy.deepcopy(batch).edge_index,
        lambda batch: batch.clone().edge_index,
        lambda batch: pickle.loads(pickle.dumps(batch)).edge_index,
        lambda batch: batch.to("cpu").edge_index,
        lambda batch: batch.contiguous().edge_index,
        lambda batch: Data.from_dict(batch.to_dict()).edge_index,
        lambda batch: Batch.from_data_list([batch]).edge_index,
        lambda batch: batch.get_edge_index("coo")[0:2] and torch.stack(batch.get_edge_index("coo")),
    ],
)
def test_every_way_of_reading_sees_the_edges(batch, plain, read):
    assert is_pending(batch)
    assert read(batch).equal(plain.edge_index)
    assert batch.edge_index is not None  # built, if it was not
    assert read(batch).equal(plain.edge_index)


@pytest.mark.parametrize(
    "look",
    [
        lambda batch: batch.num_edges,
        lambda batch: batch.num_nodes,
        lambda batch: batch.num_features,
        lambda batch: "edge_index" in batch,
        lambda batch: batch.to("cpu").num_nodes,
        lambda batch: batch.is_node_attr("x"),
        lambda batch: batch.is_edge_attr("edge_attr"),
        lambda batch: sorted(batch.keys()),
        lambda batch: len(batch),
        lambda batch: sorted(copy.copy(batch).keys()),
        lambda batch: sorted(copy.deepcopy(batch).keys()),
        lambda batch: len(pickle.dumps(batch)) > 0,
        lambda batch: [block.adj.shape for block in getattr(batch, "blocks", [])] * 0,
    ],
)
def test_what_needs_no_edges_builds_none(batch, plain, look):
    left, right = look(batch), look(plain)
    assert left == right
    assert is_pending(batch)


@pytest.mark.parametrize(
    "transform",
    [
        T.ToUndirected(),
        T.AddSelfLoops(),
        T.RemoveSelfLoops(),
        T.RemoveIsolatedNodes(),
        T.GCNNorm(),
        T.LocalDegreeProfile(),
        T.LargestConnectedComponents(),
        T.AddRandomWalkPE(2, attr_name=None),
        lambda data: data.subgraph(torch.arange(10)),
        lambda data: data.edge_subgraph(torch.arange(4)),
        lambda data: data.sort(sort_by_row=True),
        lambda data: data.coalesce() if "edge_attr" in data else data,
        lambda data: Batch.from_data_list([data, data]),
        lambda data: data.sort_by_time(),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_transforms_see_the_edges(batch, plain, transform):
    left, right = transform(batch), transform(plain)
    assert set(left.keys()) == set(right.keys())
    for name in ("x", "edge_index", "edge_attr", "edge_weight"):
        if name in right:
            assert left[name].equal(right[name]), name


def test_blocks_go_when_the_edges_are_replaced(batch):
    kept = copy.copy(batch)
    batch.edge_index = batch.edge_index[:, :3]
    assert batch.edge_index.size(1) == 3
    with pytest.raises(AttributeError, match="its edge_index was replaced"):
        _ = batch.blocks
    assert not hasattr(batch, "blocks")
    assert not hasattr(batch.to("cpu"), "blocks")
    assert kept.num_edges > 3
    assert len(kept.blocks) == 2
    assert not hasattr(kept.subgraph(torch.arange(10)), "blocks")


def test_blocks_may_be_set(batch):
    batch.blocks = batch.blocks[:1]
    assert len(batch.blocks) == 1
    assert len(copy.copy(batch).blocks) == 1


def test_blocks_follow_edge_weight(batch):
    assert batch.blocks[0].adj.values().unique().tolist() == [1.0]
    batch.edge_weight = torch.rand(batch.num_edges)
    for block in batch.blocks:
        assert block.weighted_adj.values().equal(batch.edge_weight[: block.num_edges])
    assert pickle.loads(pickle.dumps(batch)).blocks[0].weighted_adj.values().equal(batch.edge_weight)
    del batch.edge_weight
    assert batch.blocks[0].weight is None


def test_a_copy_is_independent_of_its_original(batch):
    twin = copy.copy(batch)
    twin.x, twin.edge_index, twin.extra = None, None, 5
    assert batch.x.size(0) == batch.num_nodes
    assert batch.edge_index.size(1) == batch.num_edges
    assert "extra" not in batch
    assert "edge_index" not in twin


def test_moving_a_batch_moves_its_blocks_and_keeps_the_promise(batch):
    edges = batch.num_edges
    blocks = batch.blocks
    assert batch.to("cpu").blocks[0] is blocks[0]
    moved = batch.to("meta")
    assert is_pending(moved)
    assert {block.indices.device.type for block in moved.blocks} == {"meta"}
    assert moved.edge_index.shape == (2, edges)
    assert moved.edge_index.device.type == "meta"


def test_a_batch_that_is_there_is_not_walked_through_and_what_it_hides_is_found(batch, monkeypatch):
    walks = []
    monkeypatch.setattr(Data, "apply", lambda data, *args: walks.append(args) or data)
    batch.name, batch.rate, batch.counts = "some", 0.5, [1, 2]
    assert batch.to("cpu") is batch and batch.to(torch.device("cpu"), non_blocking=True) is batch
    assert not walks
    batch.to("meta")
    batch.to("cpu", "x")
    assert len(walks) == 2
    batch.pairs = [torch.ones(1), torch.ones(1, device="meta")]
    batch.to("cpu")
    assert len(walks) == 3


def test_a_pickle_keeps_the_blocks(batch):
    twin = pickle.loads(pickle.dumps(batch))
    assert is_pending(twin)
    assert [block.num_dst for block in twin.blocks] == [block.num_dst for block in batch.blocks]
    assert twin.blocks[1].edge_index.equal(batch.blocks[1].edge_index)
    assert twin.blocks[1].indices.data_ptr() == twin.blocks[0].indices.data_ptr()


def test_it_prints_like_a_data(batch, plain):
    assert repr(batch) == f"Sampled{plain!r}"


@pytest.mark.parametrize("sampler", [NeighborSampler([4, 3, 2]), WholePartSampler(2), WholePartSampler(3)], ids=repr)
def test_trim_to_layer_leaves_the_blocks(sampler):
    batch = make_batch(sampler)
    x, edge_index, edge_attr = batch.x, batch.edge_index, batch.edge_attr
    for layer, block in enumerate(batch.blocks):
        x, edge_index, edge_attr = trim_to_layer(
            layer, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index, edge_attr
        )
        count = (
            block.num_edges if layer == 0 else edge_index.size(1)
        )  # untrimmed there may be edges that no layer needs
        assert edge_index[:, :count].equal(block.edge_index)
        assert x.equal(batch.x[: block.num_src])
        assert edge_attr[:count].equal(batch.edge_attr[: block.num_edges])


def test_a_graph_without_arrays_or_edges_makes_a_batch():
    batch = make_batch(graph=Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 200))
    assert (batch.num_nodes, batch.num_edges) == (5, 0)
    assert batch.edge_index.shape == (2, 0)
    assert batch.blocks[0].adj.to_dense().equal(torch.zeros(5, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_features_come_as_float32(dtype):
    arrays = {"x": torch.randn(200, 9).to(dtype), "y": GRAPH.node_arrays["y"]}
    graph = Graph(GRAPH.indptr, GRAPH.indices, arrays, {"edge_weight": torch.rand(GRAPH.num_edges).to(dtype)})
    batch = make_batch(graph=graph)
    assert batch.x.equal(arrays["x"][batch.n_id].float())
    assert batch.edge_weight.dtype == batch.blocks[0].weighted_adj.dtype == torch.float32
    assert batch.y.dtype == torch.int64
    sample = SAMPLER.sample_bulk(graph, [SEEDS], [BatchKey(0, 0, 0)])[0]
    narrow = assemble(graph, sample, widen=False)
    assert narrow.x.equal(arrays["x"][batch.n_id])
    assert narrow.blocks[0].adj.dtype == dtype


def test_scaled_features_come_as_float32():
    x = GRAPH.node_arrays["x"]
    small, scale = quantize_rows(x)
    arrays = {"x": small, "x_scale": scale, "code": small[:, 0].contiguous()}
    graph = Graph(GRAPH.indptr, GRAPH.indices, arrays)
    batch = make_batch(graph=graph)
    assert torch.allclose(batch.x, x[batch.n_id], atol=float(x.abs().max()) / 250)
    assert batch.x.dtype == torch.float32
    assert "x_scale" not in batch
    assert batch.code.dtype == torch.int8
    sample = SAMPLER.sample_bulk(graph, [SEEDS], [BatchKey(0, 0, 0)])[0]
    assert assemble(graph, sample, widen=False).x_scale.equal(scale[batch.n_id])
