"""The matrices of a block multiply rows of any floating type, and add up in float32 or wider."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv, GraphConv, SAGEConv

from lightning_gnn_dist.sampling.block import Adjacency, Block

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


@pytest.mark.parametrize("weighted", [False, True], ids=["adj", "weighted"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "@"])
@pytest.mark.parametrize("rows_type", TYPES, ids=str)
@pytest.mark.parametrize("matrix_type", [torch.float32, torch.bfloat16], ids=str)
def test_products_and_gradients_are_those_by_hand(
    matrix_type: torch.dtype, rows_type: torch.dtype, reduce: str, weighted: bool
) -> None:
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


LAYERS = {
    "SAGE": lambda: SAGEConv(16, 8),
    "SAGE-max": lambda: SAGEConv(16, 8, aggr="max"),
    "Graph": lambda: GraphConv(16, 8),
    "GIN": lambda: GINConv(nn.Linear(16, 8)),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "true"])
def test_layers_take_the_matrix_in_half_precision(layer: str, rows_type: torch.dtype, mixed: bool) -> None:
    block, x = block_of(), torch.randn(60, 16)
    torch.manual_seed(1)
    conv = LAYERS[layer]()
    expected = conv((x, x[:41]), block.edge_index)
    x = x.to(rows_type if mixed else torch.bfloat16)
    conv = conv if mixed else conv.bfloat16()
    with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
        got = conv((x, x[:41]), block.adj)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02 * expected.detach().abs().max().item())


def test_it_is_stored_as_a_plain_matrix() -> None:
    matrix = block_of().weighted_adj
    assert type(matrix) is Adjacency
    stored = pickle.loads(pickle.dumps(matrix))
    assert (
        type(stored) is Tensor and stored.values().equal(matrix.values()) and stored.col_indices().dtype == torch.int32
    )
    assert type(matrix * 2) is Tensor and type(matrix.to(torch.float64)) is Tensor


def test_weights_that_are_learned_are_refused() -> None:
    block = replace(block_of(), weight=torch.rand(440, requires_grad=True))
    with pytest.raises(ValueError, match=r"multiply what senders send on block\.edge_index"):
        _ = block.weighted_adj
