"""A batch of a typed graph is a ``HeteroData`` on which PyG's layers compute what they compute on the whole graph."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphConv, GraphSAGE, HeteroConv, SAGEConv, to_hetero

from lightning_gnn_dist import Graph, NeighborSampler, WholePartSampler, citations
from lightning_gnn_dist.batches.batch import in_type
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sampling.base import Sampler
from tests.graph.typed.graphs import small
from tests.samplers import of_extensions

SEEDS = torch.tensor([3, 190, 41, 7])
ALL = NeighborSampler([-1, -1])


@pytest.fixture
def data() -> HeteroData:
    """A typed graph of which every type has features, in float64."""
    data = citations(200, 2, mean_degree=3).to_pyg()
    data["venue"].x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    for store in data.node_stores:
        store.x = store.x.double()
    return data


def batch_of(graph: Graph | HeteroData, seeds: Tensor = SEEDS, sampler: Sampler = ALL, **more: Any) -> Any:
    graph = graph if isinstance(graph, Graph) else Graph.from_pyg(graph)
    (batch,) = GraphSource(graph, sampler, **more).make([seeds], [BatchKey(0, 0, 0)], [torch.arange(len(seeds))])
    return batch


class Stacked(nn.Module):
    """Two layers that take features and edges by type."""

    def __init__(self, kinds: Any) -> None:
        super().__init__()
        convs = ({kind: SAGEConv((-1, -1), 6) for kind in kinds} for _ in range(2))
        self.convs = nn.ModuleList(HeteroConv(each, aggr="mean") for each in convs)

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> dict[str, Tensor]:
        for conv in self.convs:
            x = conv(x, edges)
        return x


def test_blocks_are_the_layers(data: HeteroData) -> None:
    """Layer by layer on blocks, the seeds have the rows that HeteroConv computes for them on all edges."""
    batch, model = batch_of(data), Stacked(data.edge_types).double()
    with torch.no_grad():
        expected = model(data.x_dict, data.edge_index_dict)["paper"][SEEDS]
        x = batch.x_dict
        for conv, blocks in zip(model.convs, batch.blocks, strict=True):
            rows: dict[str, list[Tensor]] = {}
            for kind, block in blocks.items():
                ends = x[kind[0]], x[kind[2]][: block.num_dst]
                assert ends[0].shape[0] == block.num_src
                rows.setdefault(kind[2], []).append(conv.convs[kind](ends, block.adj))
            x = {kind: torch.stack(found).mean(0) for kind, found in rows.items()}
    torch.testing.assert_close(x["paper"], expected, rtol=0, atol=1e-9)


def test_to_hetero_computes_the_whole_graphs_rows(data: HeteroData) -> None:
    model, batch = to_hetero(GraphSAGE((-1, -1), 8, 2, 4), data.metadata()).double(), batch_of(data)
    with torch.no_grad():
        expected = model(data.x_dict, data.edge_index_dict)["paper"][SEEDS]
        found = model(batch.x_dict, batch.edge_index_dict)["paper"][: batch["paper"].batch_size]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_batch_has_what_pygs_has(data: HeteroData) -> None:
    graph = Graph.from_pyg(data, edge_ids=True)
    batch = batch_of(graph, all_labels=False)
    assert batch.batch_size == batch["paper"].batch_size == 4 and batch.num_targets == 4
    assert batch.input_type == batch.seed_type == "paper"
    assert batch["paper"].input_id.tolist() == [0, 1, 2, 3]
    assert batch["paper"].n_id[:4].equal(SEEDS) and batch.n_id.equal(batch["paper"].n_id)
    assert batch["paper"].y.equal(data["paper"].y[SEEDS])
    assert batch.metadata() == data.metadata() and not batch.is_filler
    for kind, store in batch.node_items():
        assert store.num_nodes == store.n_id.numel() == sum(store.num_sampled_nodes)
        assert store.x.equal(data[kind].x[store.n_id])
    for kind, store in batch.edge_items():
        assert store.time.equal(data[kind].time[store.e_id])
        ends = torch.stack([batch[kind[0]].n_id[store.edge_index[0]], batch[kind[2]].n_id[store.edge_index[1]]])
        assert ends.equal(data[kind].edge_index[:, store.e_id])
        assert store.num_edges == sum(store.num_sampled_edges)
    assert batch.validate()


def test_labels_beyond_the_seeds_are_for_those_who_ask() -> None:
    data = small()
    data["author"].y = torch.arange(7)
    few, all_of = batch_of(data, torch.arange(3), all_labels=False), batch_of(data, torch.arange(3))
    assert "y" not in few["author"] and len(few["paper"].y) == 3
    assert len(all_of["author"].y) == all_of["author"].num_nodes and len(all_of["paper"].y) == all_of["paper"].num_nodes


def test_edges_are_built_when_they_are_read(data: HeteroData) -> None:
    batch = batch_of(data)
    kind = data.edge_types[0]
    store = batch[kind]
    assert store.is_pending
    moved = copy.copy(batch).to("cpu")
    for other in (moved, pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), batch.clone()):
        assert other[kind].is_pending and not other[data.edge_types[1]].is_edge_attr("num_sampled_edges")
        assert other[kind].edge_index.equal(copy.copy(batch)[kind].edge_index)
        assert len(other.blocks) == 2 and other.seed_type == "paper"
    assert store.is_pending
    changed = copy.copy(batch)
    changed[kind].edge_index = torch.zeros(2, 0, dtype=torch.int64)
    with pytest.raises(AttributeError, match=r"they went when its edge_index of \('paper', 'cites', 'paper'\)"):
        _ = changed.blocks
    assert len(batch.blocks) == 2


def test_weights_of_edges_are_those_of_their_block() -> None:
    data = small()
    kind = ("paper", "cites", "paper")
    data[kind].edge_weight = torch.arange(40.0)
    data["author"].x = data["author"].x.float()
    batch: Any = in_type(batch_of(data, torch.arange(4)), torch.float64)
    block = batch.blocks[0][kind]
    assert block.weight is not None and block.weight.dtype == torch.float64
    conv = GraphConv((5, 5), 2).double()
    x = batch["paper"].x
    on_edges = conv((x, x[: block.num_dst]), batch[kind].edge_index, batch[kind].edge_weight)
    torch.testing.assert_close(on_edges, conv((x, x[: block.num_dst]), block.weighted_adj))


@pytest.mark.parametrize("sampler", [ALL, WholePartSampler(2), *of_extensions("TWO_HOPS")])
def test_on_edges_seeds_have_the_whole_graphs_rows(sampler: Sampler, data: HeteroData) -> None:
    seeds = SEEDS.sort().values
    batch, model = batch_of(data, seeds, sampler), Stacked(data.edge_types).double()
    assert batch["paper"].n_id[:4].equal(seeds)
    with torch.no_grad():
        rows = model(batch.x_dict, batch.edge_index_dict)["paper"][:4]
        if sampler is ALL or isinstance(sampler, WholePartSampler):
            expected = model(data.x_dict, data.edge_index_dict)["paper"][seeds]
            torch.testing.assert_close(rows, expected, rtol=0, atol=1e-9)
    assert rows.isfinite().all()


def test_seeds_are_of_one_type() -> None:
    with pytest.raises(ValueError, match=r"seeds of a batch must be nodes of one type, got some of \['paper', 'auth"):
        batch_of(small(), torch.tensor([0, 12]))


def test_a_batch_without_seeds_is_of_the_training_nodes_type() -> None:
    data = small()
    del data["author"].train_mask
    batch = batch_of(data, torch.empty(0, dtype=torch.int64))
    assert batch.seed_type == "paper" and batch["paper"].num_nodes == 0 and batch["paper"].x.shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_without_types_each_node_has_a_label_or_none(dtype: torch.dtype, data: HeteroData) -> None:
    data["paper"].y = data["paper"].y.to(dtype)
    batch = batch_of(Graph.from_pyg(data, float_labels=dtype.is_floating_point), all_labels=False)
    flat = batch.to_homogeneous()
    papers = flat.y[flat.node_type == batch.node_types.index("paper")]
    assert len(flat.y) == flat.num_nodes and "input_id" not in flat
    assert torch.equal(papers[: len(SEEDS)], data["paper"].y[SEEDS])
    others = torch.cat([papers[len(SEEDS) :], flat.y[flat.node_type != batch.node_types.index("paper")]])
    assert bool((others.isnan() if dtype.is_floating_point else others == -1).all())
    assert batch["paper"].y.shape == batch["paper"].input_id.shape == SEEDS.shape  # as it was


# A batch of a graph without types is one of a graph with one type, but for names and PyG's class.


KIND = ("node", "to", "node")
RANDOM = torch.Generator().manual_seed(0)
ARRAYS = {"x": torch.randn(90, 5, generator=RANDOM).half(), "y": torch.randint(0, 4, (90,), generator=RANDOM)}
EDGES = torch.randint(0, 90, (2, 700), generator=RANDOM)
OF_EDGES = {"edge_index": EDGES, "edge_weight": torch.rand(700, generator=RANDOM)}


@pytest.mark.parametrize("how", [{}, {"all_labels": False}, {"widen": False}])
def test_an_untyped_graph_is_one_of_one_type(how: dict[str, Any]) -> None:
    graphs = (Data(**OF_EDGES, **ARRAYS), HeteroData({"node": ARRAYS, KIND: OF_EDGES}))
    seeds, sampler = torch.tensor([7, 80, 3]), NeighborSampler([4, 3])
    ours, typed = (batch_of(Graph.from_pyg(graph, edge_ids=True), seeds, sampler, **how) for graph in graphs)
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
