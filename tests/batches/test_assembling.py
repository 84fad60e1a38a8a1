"""A batch of a graph without types is one of a graph with one type, but for names and PyG's class."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist import Graph, NeighborSampler
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey

KIND = ("node", "to", "node")
RANDOM = torch.Generator().manual_seed(0)
ARRAYS = {"x": torch.randn(90, 5, generator=RANDOM).half(), "y": torch.randint(0, 4, (90,), generator=RANDOM)}
EDGES = torch.randint(0, 90, (2, 700), generator=RANDOM)
WEIGHTS = torch.rand(700, generator=RANDOM)


def plain() -> Graph:
    return Graph.from_pyg(Data(edge_index=EDGES, edge_weight=WEIGHTS, **ARRAYS), edge_ids=True)


def of_one_type() -> Graph:
    data = HeteroData()
    data["node"].update(ARRAYS)
    data[KIND].update({"edge_index": EDGES, "edge_weight": WEIGHTS})
    return Graph.from_pyg(data, edge_ids=True)


def batch_of(graph: Graph, **how: Any) -> Any:
    (sample,) = NeighborSampler([4, 3]).sample_bulk(graph, [torch.tensor([7, 80, 3])], [BatchKey(0, 0, 0)])
    return assemble(graph, sample, **how)


@pytest.mark.parametrize("how", [{}, {"all_labels": False}, {"widen": False}])
def test_an_untyped_graph_is_one_of_one_type(how: dict[str, Any]) -> None:
    ours, typed = batch_of(plain(), **how), batch_of(of_one_type(), **how)
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
