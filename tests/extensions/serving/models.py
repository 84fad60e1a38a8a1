"""A graph, requests about it, and modules as users write them, in float64."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import GCN as ReadyGCN
from torch_geometric.nn import GATConv, GCNConv, GraphConv, HeteroConv, SAGEConv

from lightning_gnn_dist import Graph, PartitionedDataModule, layers_of, through_layers
from lightning_gnn_dist.extensions.serving.answering import Answerer
from lightning_gnn_dist.extensions.serving.question import Limits

WIDTH, CLASSES = 4, 3


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ends_of(num_nodes: int, num_edges: int, seed: int = 1) -> Tensor:
    return torch.randint(0, num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(seed))


def plain_graph(ends: Tensor, x: Tensor, **edge_arrays: Tensor) -> Graph:
    nodes = {"x": x, "y": torch.zeros(len(x)).long(), "train_mask": torch.ones(len(x)).bool()}
    return Graph.from_edge_index(ends, len(x), nodes, edge_arrays)


class OnEdges(pl.LightningModule):
    """Two layers of a kind, each on all edges of the batch, as for PyG's loaders."""

    def __init__(self, kind: type, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.convs = torch.nn.ModuleList([kind(WIDTH, 8, **options), kind(8, CLASSES, **options)]).double()

    def rows(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    def forward(self, batch: Any) -> Tensor:
        return self.rows(batch.x, batch.edge_index)[: batch.batch_size]


class OnBlocks(OnEdges):
    """The same on blocks."""

    def forward(self, batch: Any) -> Tensor:
        x = batch.x
        for layer, (conv, block) in enumerate(zip(self.convs, batch.blocks, strict=True)):
            x = conv((x, x[: block.num_dst]), block.adj)
            x = x.relu() if layer == 0 else x
        return x


class OnWeights(OnEdges):
    """Two layers that weigh edges."""

    def __init__(self) -> None:
        super().__init__(GraphConv)

    def rows(self, x: Tensor, edge_index: Tensor, *weight: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index, *weight).relu(), edge_index, *weight)

    def forward(self, batch: Any) -> Tensor:
        return self.rows(batch.x, batch.edge_index, batch.edge_weight)[: batch.batch_size]


class InLayers(pl.LightningModule):
    """PyG's ready-made GCN by its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gnn = ReadyGCN(WIDTH, 8, 2, CLASSES).double()

    def layers(self) -> Any:
        return layers_of(self.gnn)

    def rows(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.gnn(x, edge_index)

    def forward(self, batch: Any) -> Tensor:
        return through_layers(self, batch)


MODELS = {"SAGE": lambda: OnBlocks(SAGEConv), "GCN": lambda: OnEdges(GCNConv), "GAT": lambda: OnEdges(GATConv)}
MODELS["GCN in layers"] = InLayers


def answerer(model: Any, data: PartitionedDataModule, *, neighbors: int = 1000, **limits: int) -> Answerer:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return Answerer(trainer, model, data, Limits(**limits), neighbors)


class Typed(pl.LightningModule):
    """Two layers for each edge type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        first = {kind: SAGEConv((TYPED[kind[0]], TYPED[kind[2]]), 8) for kind in TYPED_EDGES}
        last = {kind: SAGEConv((8, 8), CLASSES) for kind in TYPED_EDGES}
        self.convs = torch.nn.ModuleList(HeteroConv(of_layer, aggr="sum") for of_layer in (first, last)).double()

    def rows(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> Tensor:
        hidden = {kind: rows.relu() for kind, rows in self.convs[0](x, edges).items()}
        rows: Tensor = self.convs[1](hidden, edges)["paper"]
        return rows

    def forward(self, batch: Any) -> Tensor:
        return self.rows(batch.x_dict, batch.edge_index_dict)[: batch.batch_size]


TYPED = {"author": 2, "paper": WIDTH}
TYPED_EDGES = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "rev_writes", "author")]
COUNTS = {"author": 20, "paper": 40}


def typed_data(time: bool = False) -> HeteroData:
    """Authors and papers; with times of citations and of authors, and of papers as seeds."""
    data = HeteroData()
    for seed, (kind, width) in enumerate(TYPED.items()):
        data[kind].x = double(COUNTS[kind], width, seed=seed)
    data["paper"].y, data["paper"].train_mask = torch.zeros(40).long(), torch.ones(40).bool()
    for seed, kind in enumerate(TYPED_EDGES):
        ends = ends_of(1000, 120, seed)
        data[kind].edge_index = torch.stack([ends[0] % COUNTS[kind[0]], ends[1] % COUNTS[kind[2]]])
    if time:
        data["paper"].time = ends_of(100, 20).view(-1)
        data["author"].time = ends_of(100, 10).view(-1)
    return data
