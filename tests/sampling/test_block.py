"""Blocks compute what edge_index computes, and less."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv, GraphConv, LEConv, SAGEConv, SimpleConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sampling.block import Adjacency, Block
from tests.samplers import of_extensions
from tests.sampling.reference import random_graph

SAMPLERS: list[Any] = [lgd.NeighborSampler([4, 3]), lgd.NeighborSampler([-1, -1]), lgd.NeighborSampler([2, 2, 2])]
SAMPLERS += [lgd.NeighborSampler([5]), *map(lgd.WholePartSampler, (1, 2, 3))]
OTHERS = [lgd.ClusterSampler(2), lgd.ClusterSampler(1), *of_extensions("APART")]
OTHERS += [sampler for sampler in of_extensions("INDUCED") if not getattr(sampler, "visits", 0)]
GRAPH = random_graph(200, 1500, seed=2)
GRAPH.node_arrays["chunk"] = torch.arange(200) * 7 % 10
SEEDS = torch.tensor([4, 190, 7, 60, 33, 199])  # 199 is isolated


def make_batch(sampler: Any, graph: lgd.Graph = GRAPH) -> SampledData:
    return assemble(graph, sampler.sample_bulk(graph, [SEEDS], [BatchKey(0, 0, 0)])[0])


CONVS: dict[str, Callable[[], Any]] = {
    "mean": lambda: SAGEConv(8, 8, aggr="mean"),
    "max": lambda: SAGEConv(8, 8, aggr="max"),
    "sum": lambda: GraphConv(8, 8),
    "attention on edges": lambda: GATv2Conv(8, 8, add_self_loops=False),
}


@pytest.mark.parametrize("sampler", [*SAMPLERS, *OTHERS], ids=repr)
@pytest.mark.parametrize("make", CONVS.values(), ids=CONVS)
def test_a_model_on_blocks_is_the_model_on_edge_index(sampler, make):
    batch = make_batch(sampler)
    convs = nn.ModuleList(make() for _ in range(sampler.num_hops))
    on_blocks = on_edges = batch.x
    for conv, block in zip(convs, batch.blocks, strict=True):
        edges = block.edge_index if isinstance(conv, GATv2Conv) else block.adj
        on_blocks = conv((on_blocks, on_blocks[: block.num_dst]), edges).tanh()
        on_edges = conv(on_edges, batch.edge_index).tanh()
    weights = torch.linspace(-1, 1, on_blocks.numel()).view_as(on_blocks)
    made = []
    for rows in (on_blocks, on_edges[: batch.batch_size]):
        made.append([rows, *torch.autograd.grad((rows * weights).sum(), list(convs.parameters()))])
    torch.testing.assert_close(*made, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_blocks_are_views_of_one_csr(sampler):
    batch = make_batch(sampler)
    first, *others = batch.blocks
    assert first.edge_index.equal(batch.edge_index[:, : first.num_edges])
    needs_all = not isinstance(sampler, lgd.WholePartSampler)
    assert first.num_edges == batch.num_edges or not needs_all
    assert (first.num_src, batch.blocks[-1].num_dst) == (batch.num_nodes, batch.batch_size)
    for outer, inner in zip(batch.blocks, others, strict=False):
        assert outer.num_dst == inner.num_src
    for block in batch.blocks:
        assert block.indptr.data_ptr() == first.indptr.data_ptr()
        assert block.indices.data_ptr() == first.indices.data_ptr()
        assert block.indptr.numel() == block.num_dst + 1
        assert block.indptr[-1] == block.num_edges == block.edge_index.size(1)
        assert block.adj.shape == (block.num_dst, block.num_src)
        with torch._C.DisableTorchFunctionSubclass():  # layers are given a copy in int64
            assert block.adj.col_indices().data_ptr() == first.indices.data_ptr()
        assert block.edge_index.equal(first.edge_index[:, : block.num_edges])
        assert block.num_edges == 0 or block.indices.max() < block.num_src


def test_a_block_is_frozen_built_once_pickled_and_moved():
    block = make_batch(lgd.NeighborSampler([4, 3])).blocks[1]
    with pytest.raises(AttributeError):
        block.num_dst = 3
    assert block.adj is block.adj and block.edge_index is block.edge_index and block.to("cpu") is block
    assert block.adj.is_sparse_csr
    for twin in (pickle.loads(pickle.dumps(block)), copy.deepcopy(block), block.apply(torch.clone)):
        assert isinstance(twin, Block)
        assert twin.edge_index.equal(block.edge_index)
    assert block.to("meta").indices.device.type == "meta"


TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HALVES = TYPES[:2]


def block_of(dtype: torch.dtype = torch.float32) -> Block:
    """41 rows of 0 to 60 senders."""
    torch.manual_seed(0)
    counts = torch.cat([torch.arange(40) % 21, torch.tensor([60])])
    senders = torch.cat([torch.randperm(60)[:count] for count in counts.tolist()])
    indptr = nn.functional.pad(counts.cumsum(0), (1, 0))
    return Block(41, 60, indptr.int(), senders.int(), torch.rand(len(senders)), dtype)


def by_hand(block: Block, weight: Tensor, rows: Tensor, reduce: str) -> Tensor:
    """One row after the other in float64."""
    made = []
    for start, end in zip(block.indptr[:-1].tolist(), block.indptr[1:].tolist(), strict=True):
        sent = rows[block.indices[start:end].long()].double() * weight[start:end, None].double()
        empty = torch.zeros(1, rows.shape[1], dtype=torch.float64)
        total = sent.sum(0) / max(1, end - start) if reduce == "mean" else sent.sum(0)
        made.append(total if reduce != "amax" else (sent if end > start else empty).amax(0))
    return torch.stack(made)


@pytest.mark.parametrize("rows_type", TYPES, ids=str)
def test_products_and_gradients_are_those_by_hand(rows_type: torch.dtype) -> None:
    for each in product([torch.float32, torch.bfloat16], ["sum", "mean", "amax", "@"], [False, True]):
        check_products(rows_type, *each)


def check_products(rows_type: torch.dtype, matrix_type: torch.dtype, reduce: str, weighted: bool) -> None:
    block = block_of(matrix_type)
    weight = block.weight.to(rows_type) if weighted else torch.ones(block.num_edges)
    distinct = torch.stack([torch.randperm(60) for _ in range(16)], 1) / 8 - 4
    rows = distinct.to(rows_type).requires_grad_()
    matrix = block.weighted_adj if weighted else block.adj
    got = matrix @ rows if reduce == "@" else torch.sparse.mm(matrix, rows, reduce)
    assert got.dtype == rows_type and type(got) is Tensor
    expected = by_hand(block, weight, rows, reduce)
    largest = expected.detach().abs().max().item()
    eps = torch.finfo(rows_type).eps * (4 if rows_type in HALVES else 100)  # halves: once, from sums that are wider
    torch.testing.assert_close(got.double(), expected, rtol=eps, atol=eps * largest)
    weights = torch.randn_like(got)
    (gradient,) = torch.autograd.grad(got, rows, weights)
    (by_rows,) = torch.autograd.grad(expected, rows, weights.double())
    torch.testing.assert_close(gradient, by_rows, rtol=eps, atol=eps * by_rows.abs().max().item())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax"])
def test_gradients_of_many_receivers_add_up_in_float32(dtype: torch.dtype, reduce: str) -> None:
    many = 5000  # ones, of which bfloat16 would count 256 and float16 2,048
    block = Block(many, 3, torch.arange(many + 1), torch.zeros(many, dtype=torch.int64))
    rows = torch.ones(3, 16, dtype=dtype, requires_grad=True)
    torch.sparse.mm(block.adj, rows, reduce).backward(torch.ones(many, 16, dtype=dtype))
    assert rows.grad is not None and (rows.grad[0].double() - many).abs().max() <= many * torch.finfo(dtype).eps


def test_it_is_stored_as_a_plain_matrix() -> None:
    matrix = block_of().weighted_adj
    assert type(matrix) is Adjacency
    stored = pickle.loads(pickle.dumps(matrix))
    assert type(stored) is Tensor and stored.values().equal(matrix.values())
    assert stored.col_indices().dtype == torch.int32
    assert type(matrix * 2) is Tensor and type(matrix.to(torch.float64)) is Tensor


def test_weights_that_are_learned_are_refused() -> None:
    block = replace(block_of(), weight=torch.rand(440, requires_grad=True))
    with pytest.raises(ValueError, match=r"multiply what senders send on block\.edge_index"):
        _ = block.weighted_adj


# PyG's layers compute on ``weighted_adj`` what they compute with weights of edges.


WEIGHTED = random_graph(200, 1500, seed=2)
WEIGHTED.edge_arrays["edge_weight"] = torch.rand(1500, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [lambda: GraphConv(8, 8), lambda: LEConv(8, 8), SimpleConv])
def test_a_layer_on_weighted_adj_is_the_layer_with_edge_weight(make):
    batch, layer = make_batch(lgd.NeighborSampler([4, 3]), WEIGHTED), make().eval()
    for block in batch.blocks:
        pair = batch.x[: block.num_src], batch.x[: block.num_dst]
        weighed = layer(pair, block.edge_index, batch.edge_weight[: block.num_edges])
        torch.testing.assert_close(layer(pair, block.weighted_adj), weighed, atol=1e-6, rtol=1e-5)
        assert (layer(pair, block.adj) - weighed).abs().max() > 0.01


SAMPLERS_OF_LAYERS = [lgd.LadiesSampler([9, 9]), lgd.FastGCNSampler([99, 99]), *of_extensions("WEIGHED")]


@pytest.mark.parametrize("sampler", SAMPLERS_OF_LAYERS, ids=repr)
def test_weights_of_a_sampler_are_not_left_out_in_silence(sampler):
    batch = make_batch(sampler, WEIGHTED)
    for block in batch.blocks:
        assert block.weighted_adj.values().equal(batch.edge_weight[: block.num_edges])
        with pytest.raises(ValueError, match=r"Use block\.weighted_adj, with a layer that adds up"):
            _ = block.adj
    batch.edge_weight = torch.ones(batch.num_edges)  # the user's own
    assert batch.blocks[0].adj.values().unique().tolist() == [1.0]


def test_a_batch_without_weights_has_no_weighted_matrix():
    batch = make_batch(lgd.NeighborSampler([4, 3]), WEIGHTED)
    assert batch.blocks[0].adj.values().unique().tolist() == [1.0]
    del batch.edge_weight
    with pytest.raises(AttributeError, match=r"or use block\.adj, where every edge counts 1"):
        _ = batch.blocks[0].weighted_adj
    batch.edge_weight = torch.rand(batch.num_edges, 2)  # not one number for each edge
    assert not hasattr(batch.blocks[0], "weighted_adj")
