"""The layers of PyG's ready-made models compute what the models compute, on the whole graph and on a batch of it."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export, load, save
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, PNA, EdgeCNN, GATConv, GraphSAGE, SAGEConv, SGConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist import Graph, NeighborSampler, WholePartSampler, layers_of, through_layers
from lightning_gnn_dist.layers.through_layers import whole_graph_arrays
from tests.layers.test_through_layers import NUM_NODES, SEEDS, batch_of
from tests.slow import slow


def whole_data() -> Data:
    """With some self-loops, one of them twice, nodes that nobody sends to, weights and edge features."""
    generator = torch.Generator().manual_seed(5)
    edge_index = torch.randint(NUM_NODES, (2, 700), generator=generator)
    edge_index[:, :30] = torch.arange(30)
    edge_index[1][edge_index[1] % 9 == 8] = 1
    x = torch.randn(NUM_NODES, 6, generator=generator).double()
    data = Data(x, torch.cat([edge_index.unique(dim=1), torch.tensor([[3], [3]])], 1))
    data.edge_weight = torch.rand(data.num_edges, generator=generator).double()
    data.edge_attr = torch.randn(data.num_edges, 4, generator=generator).double()
    return data


DATA = whole_data()
GRAPH = Graph.from_pyg(DATA)


class Kind(NamedTuple):
    """A ready-made model, its options, and the names of the arrays of edges that it takes."""

    model: type[BasicGNN]
    options: dict[str, Any]
    edges: Mapping[str, str] = MappingProxyType({})


DEGREES = torch.bincount(GRAPH.degrees())
PNA_OPTIONS = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "attenuation"], "deg": DEGREES}
KINDS = {
    "sage": Kind(GraphSAGE, {}),
    "sage-max": Kind(GraphSAGE, {"aggr": "max"}),
    "sage-projected": Kind(GraphSAGE, {"aggr": "sum", "project": True, "normalize": True}),
    "gcn": Kind(GCN, {}),
    "gcn-weighted": Kind(GCN, {}, {"edge_weight": "edge_weight"}),
    "gcn-improved": Kind(GCN, {"improved": True}, {"edge_weight": "edge_weight"}),
    "gcn-improved-ones": Kind(GCN, {"improved": True}),
    "gcn-without-loops": Kind(GCN, {"add_self_loops": False}),
    "gcn-as-given": Kind(GCN, {"normalize": False, "bias": False}, {"edge_weight": "edge_weight"}),
    "gin": Kind(GIN, {"train_eps": True, "act_first": True}),
    "gat": Kind(GAT, {"heads": 2, "edge_dim": 4}, {"edge_attr": "edge_attr"}),
    "gat-v2": Kind(GAT, {"heads": 2, "v2": True}),
    "pna": Kind(PNA, PNA_OPTIONS),
    "pna-edges": Kind(PNA, PNA_OPTIONS | {"edge_dim": 4}, {"edge_attr": "edge_attr"}),
    "edge-cnn": Kind(EdgeCNN, {}),
}


class Net(torch.nn.Module):
    def __init__(self, gnn: BasicGNN, edges: Mapping[str, str]) -> None:
        super().__init__()
        self.gnn, self.edges = gnn, dict(edges)

    def layers(self) -> Any:
        return layers_of(self.gnn, **self.edges)

    def forward(self, batch: Data) -> Tensor:
        return through_layers(self, batch)

    def by_pyg(self, data: Data) -> Tensor:
        return self.gnn(data.x, data.edge_index, **{argument: data[name] for argument, name in self.edges.items()})


def net_of(kind: str, num_layers: int, **options: Any) -> Net:
    torch.manual_seed(num_layers)
    model, own, edges = KINDS[kind]
    options = {"norm": "batch_norm", "dropout": 0.5} | own | options
    return Net(model(6, 8, num_layers, options.pop("out_channels", 3), **options).double().eval(), edges)


def with_degrees(net: Net) -> Graph:
    arrays = GRAPH.node_arrays | whole_graph_arrays(net.layers(), GRAPH)
    return Graph(GRAPH.indptr, GRAPH.indices, arrays, GRAPH.edge_arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_compute_what_the_model_computes(kind: str) -> None:
    for jk, num_layers in (*product([None], (1, 2, 3, 4)), *product(("last", "cat", "max", "lstm"), (3,)), ("cat", 1)):
        net = net_of(kind, num_layers, jk=jk)
        exact = batch_of(NeighborSampler([-1] * num_layers), with_degrees(net))
        torch.testing.assert_close(net(exact), net.by_pyg(DATA)[SEEDS], atol=1e-12, rtol=0)
        sampled = batch_of(NeighborSampler([3] * num_layers), GRAPH)
        torch.testing.assert_close(net(sampled), net.by_pyg(sampled)[:6], atol=1e-12, rtol=0)
        torch.testing.assert_close(net(DATA), net.by_pyg(DATA), atol=1e-12, rtol=0)


WHOLE = ["sage", "gcn-weighted", "gin", "gat", "pna", "edge-cnn"]


SAMPLED = [(kind, NeighborSampler([3, 3])) for kind in KINDS] + [(kind, WholePartSampler(2)) for kind in WHOLE]


@pytest.mark.parametrize(("kind", "sampler"), SAMPLED, ids=repr)
def test_gradients_are_those_of_the_model(kind: str, sampler: Any) -> None:
    net, batch = net_of(kind, 2, norm=None, jk="cat", dropout=0.0).train(), batch_of(sampler, GRAPH)
    copied, batch.x = copy.deepcopy(net), batch.x.requires_grad_()
    parameters = [*net.parameters(), batch.x]
    found, expected = (
        torch.autograd.grad(rows.square().sum(), parameters, allow_unused=True)
        for rows in (net(batch), net.by_pyg(batch)[:6])
    )
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    assert copied(batch).equal(net(batch))


def test_learned_weights_get_their_gradient() -> None:
    net, batch = net_of("gcn-weighted", 2), batch_of(NeighborSampler([3, 3]), GRAPH)
    batch.edge_weight = batch.edge_weight.requires_grad_()
    found, expected = (
        torch.autograd.grad(rows.square().sum(), batch.edge_weight)[0] for rows in (net(batch), net.by_pyg(batch)[:6])
    )
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


class Own(GCN):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, edge_index).tanh()


class Unknown(GCN):
    def init_conv(self, in_channels: int, out_channels: int, **options: Any) -> SGConv:
        return SGConv(in_channels, out_channels, K=2)


OF_ALL_ROWS = r"norm: \w+Norm normalises by all rows of the graph at once"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (nn.Linear(1, 1), {}, "gnn must be a GraphSAGE, GCN, GIN, GAT, PNA or EdgeCNN"),
    (Own(6, 8, 2), {}, "Own has a forward of its own"),
    (Unknown(6, 8, 2), {}, "Unknown has layers SGConv"),
    (GIN(6, 8, 2), {"edge_weight": "w"}, "edge_weight: GIN takes none, got 'w'"),
    (GCN(6, 8, 2, cached=True), {}, r"GCN\(cached=True\) keeps the degrees of its first batch"),
    (GCN(6, 8, 2, aggr="max"), {}, r"GCN\(aggr='max'\)"),
    (GraphSAGE(6, 8, 2, flow="target_to_source"), {}, r"flow='target_to_source'"),
    *((GraphSAGE(6, 8, 2, norm=f"{name}_norm"), {}, OF_ALL_ROWS) for name in ("graph", "layer", "pair")),
]


@pytest.mark.parametrize(("gnn", "edges", "message"), REFUSED)
def test_what_layers_cannot_compute_is_refused(gnn: Any, edges: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        layers_of(gnn, **edges)


@pytest.mark.parametrize("kind", ["sage", "gin", "edge-cnn"])
def test_norms_of_single_rows_are_exact_in_training_too(kind: str) -> None:
    net = net_of(kind, 3, norm="layer_norm", norm_kwargs={"mode": "node"}, dropout=0.0).train()
    batch = batch_of(NeighborSampler([3] * 3), GRAPH)
    torch.testing.assert_close(net(batch), net.by_pyg(batch)[:6], atol=1e-12, rtol=0)


def test_dropout_follows_the_model_and_half_precision_takes_edges() -> None:
    net, batch = net_of("sage", 2), batch_of(NeighborSampler([3, 3]), GRAPH)
    assert net(batch).equal(net(batch)) and not net.train()(batch).equal(net(batch))
    net = net_of("gcn", 2, norm=None).float()
    batch.x = batch.x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(net(batch), net.by_pyg(batch)[:6], atol=5e-2, rtol=5e-2, check_dtype=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns of what it meets while it traces
@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
def test_compiled_modules_and_compiled_layers_give_the_same(kind: str) -> None:
    net, batch = net_of(kind, 2, dropout=0.0), batch_of(NeighborSampler([3, 3]), GRAPH)
    expected = net(batch)
    torch.testing.assert_close(torch.compile(net, backend="eager")(batch), expected)
    for index, conv in enumerate(net.gnn.convs):
        net.gnn.convs[index] = torch.compile(conv, backend="eager")
    torch.testing.assert_close(net(batch), expected)


# What ``torch.export`` makes of a module by its layers: the same rows on graphs of any size, without this package.


WIDTH, CLASSES = 4, 3


class OnTensors(nn.Module):
    """A module by its layers, on tensors."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return through_layers(self.module, Data(x=x, edge_index=edge_index))


class ByHand(nn.Module):
    """Two layers of a kind."""

    def __init__(self, kind: type, reads: str = "edge_index") -> None:
        super().__init__()
        self.convs = nn.ModuleList([kind(WIDTH, 8), kind(8, CLASSES)])
        self.reads = reads

    def layers(self) -> list[Callable[[Any], Tensor]]:
        edges = (lambda batch: batch.blocks[0].adj) if self.reads == "blocks" else lambda batch: batch.edge_index
        first, last = self.convs
        return [lambda batch: first(batch.x, edges(batch)).relu(), lambda batch: last(batch.x, edges(batch))]


class ReadyMade(nn.Module):
    """One of PyG's models."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.gnn = kind(WIDTH, 8, 2, CLASSES)

    def layers(self) -> Any:
        return layers_of(self.gnn)


def some(num_nodes: int, num_edges: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_nodes)
    x = torch.randn(num_nodes, WIDTH, generator=generator)
    return x, torch.randint(0, num_nodes, (2, num_edges), generator=generator)


def exported(module: nn.Module, path: Path) -> Any:
    shapes = {"x": {0: Dim("nodes", min=2)}, "edge_index": {1: Dim("edges", min=2)}}
    save(export(OnTensors(module.eval()), some(10, 30), dynamic_shapes=shapes, strict=False), path)
    return load(path).module()


EXPORTED = [(ByHand, SAGEConv), (ReadyMade, GCN), slow(ByHand, GATConv), slow(ReadyMade, GAT)]


@pytest.mark.filterwarnings("ignore")  # torch's own, of export
@pytest.mark.parametrize(("make", "kind"), EXPORTED)
def test_an_exported_module_has_the_same_rows_on_graphs_of_other_sizes(make: Any, kind: Any, tmp_path: Path) -> None:
    module = make(kind)
    again = exported(module, tmp_path / "model.pt2")
    for given in (some(10, 30), some(50, 400), some(3, 2)):
        torch.testing.assert_close(again(*given), OnTensors(module)(*given), rtol=0, atol=1e-6)


ALONE = """
import sys, torch
model = torch.export.load(sys.argv[1]).module()
print(model(torch.ones(3, 4), torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])).tolist())
assert not {"torch_geometric", "lightning", "lightning_gnn_dist"} & sys.modules.keys()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_exported_module_needs_torch_alone(tmp_path: Path) -> None:
    module, path = ByHand(SAGEConv), tmp_path / "model.pt2"
    exported(module, path)
    alone = subprocess.run([sys.executable, "-c", ALONE, path], capture_output=True, text=True, check=True)
    ends = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
    there = torch.tensor(json.loads(alone.stdout))
    torch.testing.assert_close(there, OnTensors(module)(torch.ones(3, WIDTH), ends), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_layers_that_read_blocks_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="blocks"):
        exported(ByHand(SAGEConv, reads="blocks"), tmp_path / "model.pt2")
