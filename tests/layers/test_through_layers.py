"""A model that is defined once, by its layers, computes what a forward by hand computes, on whatever the batch is."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.transforms import GCNNorm

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.one_hop import one_hop, seen_by_layers
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sampling.base import Sampler
from tests.boundary.models import Model
from tests.boundary.models import model as of_blocks
from tests.layers.models import Stacked
from tests.layers.models import model as of_rows
from tests.samplers import of_extensions

NUM_NODES, SEEDS = 120, torch.tensor([4, 99, 7, 60, 33, 118])
EVERY_KIND = [
    lgd.NeighborSampler([3, 4]),
    lgd.NeighborSampler([-1, -1]),
    lgd.ClusterSampler(num_hops=2),
    lgd.WholePartSampler(num_hops=2),
    *of_extensions("TWO_HOPS"),
]


def whole_data() -> Data:
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(NUM_NODES, (2, 900), generator=generator).unique(dim=1)
    data = GCNNorm()(Data(torch.randn(NUM_NODES, 6, generator=generator).double(), edge_index))
    data.edge_attr = torch.randn(data.num_edges, 4, generator=generator).double()
    data.chunk = torch.arange(NUM_NODES) % 4
    return data


DATA = whole_data()
GRAPH = lgd.Graph.from_pyg(DATA)


def batch_of(sampler: Sampler, graph: lgd.Graph = GRAPH) -> SampledData:
    return assemble(graph, sampler.sample_bulk(graph, [SEEDS], [BatchKey(0, 0, 0)])[0])


class ByHand(Stacked):
    """With the forward on blocks that its layers replace."""

    def by_hand(self, batch: Any) -> Tensor:
        x = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = self._between(conv, conv((x, x[: block.num_dst]), block.adj))
        return x


MADE: dict[str, Callable[[], Any]] = {
    "APPNP": lambda: of_rows("APPNP", 2),  # every layer adds the first one's input
    "JK": lambda: of_blocks("JK", 2),
    "GAT": lambda: of_rows("GAT", 2),  # returns rows for all nodes of the batch, of which the first are taken
}


@pytest.mark.parametrize("sampler", EVERY_KIND, ids=lambda sampler: type(sampler).__name__)
def test_it_equals_a_forward_by_hand_bit_for_bit(sampler: Sampler) -> None:
    torch.manual_seed(0)
    model, batch = ByHand(SAGEConv, 2).double(), batch_of(sampler)
    rows, expected = model(batch), model.by_hand(batch)
    assert rows.shape == (len(SEEDS), 3) and rows.equal(expected)
    grads = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (rows, expected)]
    assert all(map(torch.equal, *grads))
    assert batch.get("x0") is None and batch._store.is_pending  # the batch itself is as it was


@pytest.mark.parametrize("name", MADE)
def test_full_neighbourhoods_give_what_the_whole_graph_gives(name: str) -> None:
    model = MADE[name]().eval()
    expected = model.whole(DATA.x, DATA.edge_index)
    for sampler in (lgd.NeighborSampler([-1, -1]), lgd.WholePartSampler(num_hops=2)):
        batch = batch_of(sampler)
        torch.testing.assert_close(lgd.through_layers(model, batch), expected[batch.n_id[:6]], atol=1e-12, rtol=0)
    if not isinstance(model, Model):  # which reads blocks
        torch.testing.assert_close(lgd.through_layers(model, DATA), expected, atol=1e-12, rtol=0)


def test_a_batch_of_pyg_is_computed_on_all_its_nodes() -> None:
    model = MADE["APPNP"]()
    as_of_pyg = Data.from_dict(batch_of(lgd.NeighborSampler([4, 4])).to_dict())  # as PyG's NeighborLoader yields
    replaced = batch_of(lgd.NeighborSampler([3, 3]))
    replaced.edge_index = replaced.edge_index[:, ::2]
    for batch in (as_of_pyg, replaced):
        expected = model.whole(batch.x, batch.edge_index)[:6]
        torch.testing.assert_close(lgd.through_layers(model, batch), expected, atol=1e-12, rtol=0)


def test_a_batch_of_one_hop_has_the_first_rows_of_every_array() -> None:
    batch = batch_of(lgd.NeighborSampler([3, 4]))
    batch.edge_index, blocks = batch.edge_index.clone(), batch.blocks  # as a module may that reads both
    batch.blocks = blocks
    inner = batch.blocks[1]
    view = one_hop(batch, seen_by_layers(batch)[1])
    assert view.batch_size == inner.num_dst and view.num_nodes == inner.num_src and view.num_edges == inner.num_edges
    assert view.edge_index.equal(batch.edge_index[:, : inner.num_edges])
    for name in ("x", "n_id", "chunk"):
        assert view[name].equal(batch[name][: inner.num_src]) and view[name].data_ptr() == batch[name].data_ptr()
    for name in ("edge_weight", "edge_attr"):
        assert view[name].equal(batch[name][: inner.num_edges])
    assert view.blocks == [inner] and view.num_sampled_nodes == [inner.num_dst, inner.num_src - inner.num_dst]


def test_arrays_of_edges_are_told_from_those_of_nodes_where_there_are_as_many() -> None:
    senders = torch.tensor([1, 2, 3, 0])  # a ring: as many edges as nodes
    graph = lgd.Graph.from_edge_index(
        torch.stack([senders, torch.arange(4)]), 4, {"x": torch.eye(4)}, {"w": torch.arange(4.0)}
    )
    (sample,) = lgd.WholePartSampler(num_hops=2).sample_bulk(graph, [torch.tensor([0])], [BatchKey(0, 0, 0)])
    batch = assemble(graph, sample)
    view = one_hop(batch, seen_by_layers(batch)[1])
    assert view.w.shape == (1,) and view.x.shape == (2, 4)


class Wrong(Stacked):
    def layers(self) -> Sequence[Callable[[Any], Tensor]]:
        return [super().layers()[0], lambda batch: batch.x[:2]]


class Normalises(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(6, 3)

    def layers(self) -> Sequence[Callable[[Any], Tensor]]:
        return [lambda batch: self.conv(batch.x, batch.edge_index)]


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\(\) returns 2 layers, but the batch .* blocks for 3\. Give .*\* 2\)"):
        Stacked(SAGEConv, 2).double()(batch_of(lgd.NeighborSampler([2, 2, 2])))
    with pytest.raises(TypeError, match=r"Layer 1 of layers\(\) returned a tensor of .* a batch of 6 nodes: it must"):
        Wrong(SAGEConv, 2).double()(batch_of(lgd.NeighborSampler([2, 2])))
    with pytest.raises(TypeError, match=r"module must have a method layers\(\), got .*\. Define it"):
        lgd.through_layers(torch.nn.Linear(1, 1), DATA)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"module: GCNConv normalises by the degrees in its batch.*GCNNorm"):
        lgd.through_layers(Normalises(), batch_of(lgd.NeighborSampler([2])))
    with pytest.raises(TypeError, match="batch must be a batch of a loader"):
        lgd.through_layers(Stacked(SAGEConv, 2), DATA.x)  # type: ignore[arg-type]
