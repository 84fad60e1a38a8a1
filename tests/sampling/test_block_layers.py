"""PyG's layers compute on ``adj`` what they compute on ``edge_index``, and on ``weighted_adj`` likewise."""

import inspect
from typing import Any

import pytest
import torch
import torch_geometric.nn.conv as pyg
from torch import Tensor, nn
from torch_geometric.utils import coalesce

from lightning_gnn_dist import (
    FastGCNSampler,
    Graph,
    LadiesSampler,
    NeighborSampler,
    RandomWalkSampler,
    WholePartSampler,
)
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey

ARGUMENTS = {
    **{"in_channels": 8, "out_channels": 8, "channels": 8, "num_layers": 2, "K": 2, "alpha": 0.1, "heads": 1},
    **{"powers": [0, 1, 2], "edge_dim": 3, "hidden_channels": 8, "num_relations": 1},
}
PAIRS = ["GATConv", "GATv2Conv", "GENConv", "GINConv", "GraphConv", "LEConv", "ResGatedGraphConv", "SAGEConv"]
PAIRS += ["SimpleConv", "TransformerConv", "FeaStConv", "CGConv"]
WEIGHED_PAIRS = ["GraphConv", "LEConv", "SimpleConv"]
WEIGHED = ["GCNConv", "GatedGraphConv", "TAGConv", "SGConv", "SSGConv", "APPNP", "GCN2Conv", "LGConv"]
WEIGHED += ["MixHopConv", "GraphConv", "SimpleConv", "LEConv"]
PLAIN = [*WEIGHED, "SAGEConv", "GINConv", "ClusterGCNConv", "EGConv", "AGNNConv", "GATConv", "GENConv", "FAConv"]


def layer_of(name: str) -> nn.Module:
    """A layer from 8 to 8 features; those with a network inside get a linear one."""
    torch.manual_seed(0)
    cls = getattr(pyg, name)
    given = {**ARGUMENTS, "nn": nn.Linear(8, 8)}
    asked = inspect.signature(cls.__init__).parameters.values()
    return cls(**{p.name: given[p.name] for p in asked if p.name in given and p.default is p.empty}).eval()


def batch_of(sampler: Any, *, num_seeds: int = 6) -> SampledData:
    torch.manual_seed(0)
    edge_index = coalesce(torch.randint(195, (2, 1500)))
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    arrays = {"x": torch.randn(200, 8)}
    graph = Graph.from_edge_index(edge_index, 200, arrays, {"edge_weight": torch.rand(edge_index.shape[1])})
    return assemble(graph, sampler.sample_bulk(graph, [torch.arange(num_seeds)], [BatchKey(0, 0, 0)])[0])


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of matrices that PyG makes of ours
@pytest.mark.parametrize("name", PAIRS)
def test_a_layer_on_adj_is_the_layer_on_edge_index(name):
    batch, layer = batch_of(NeighborSampler([4, 3])), layer_of(name)
    for block in batch.blocks:
        pair = batch.x[: block.num_src], batch.x[: block.num_dst]
        assert_close(layer(pair, block.adj), layer(pair, block.edge_index))


@pytest.mark.parametrize("name", WEIGHED_PAIRS)
def test_a_layer_on_weighted_adj_is_the_layer_with_edge_weight(name):
    batch, layer = batch_of(NeighborSampler([4, 3])), layer_of(name)
    for block in batch.blocks:
        pair = batch.x[: block.num_src], batch.x[: block.num_dst]
        weighed = layer(pair, block.edge_index, batch.edge_weight[: block.num_edges])
        assert_close(layer(pair, block.weighted_adj), weighed)
        assert (layer(pair, block.adj) - weighed).abs().max() > 0.01


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", PLAIN)
def test_where_all_nodes_are_seeds_layers_of_one_input_do_the_same(name):
    batch, layer = batch_of(WholePartSampler(1), num_seeds=200), layer_of(name)
    (block,) = batch.blocks
    more = {"FAConv": [batch.x], "GCN2Conv": [batch.x]}.get(name, [])
    assert_close(layer(batch.x, *more, block.adj), layer(batch.x, *more, batch.edge_index))
    if name in WEIGHED:
        weighed = layer(batch.x, *more, batch.edge_index, batch.edge_weight)
        assert_close(layer(batch.x, *more, block.weighted_adj), weighed)


SAMPLERS = [LadiesSampler([9, 9]), FastGCNSampler([99, 99]), RandomWalkSampler(2, visits=2)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_weights_of_a_sampler_are_not_left_out_in_silence(sampler):
    batch = batch_of(sampler)
    for block in batch.blocks:
        assert block.weighted_adj.values().equal(batch.edge_weight[: block.num_edges])
        with pytest.raises(ValueError, match=r"Use block\.weighted_adj, with a layer that adds up"):
            _ = block.adj
    batch.edge_weight = torch.ones(batch.num_edges)  # the user's own
    assert batch.blocks[0].adj.values().unique().tolist() == [1.0]


def test_a_batch_without_weights_has_no_weighted_matrix():
    batch = batch_of(RandomWalkSampler(2, visits=0))
    assert batch.blocks[0].adj.values().unique().tolist() == [1.0]
    del batch.edge_weight
    with pytest.raises(AttributeError, match=r"or use block\.adj, where every edge counts 1"):
        _ = batch.blocks[0].weighted_adj
    batch.edge_weight = torch.rand(batch.num_edges, 2)  # not one number for each edge
    assert not hasattr(batch.blocks[0], "weighted_adj")
