"""Models of PyG by their layers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import GCN, GraphSAGE, SAGEConv

from lightning_gnn_dist import layers_of
from tests.boundary.models import Model
from tests.layers.models import NUM_CLASSES, NUM_FEATURES

READY = ["PyG GCN", "PyG JK"]


class Ready(Model):
    """One of PyG's models."""

    def __init__(self, kind: Any, num_layers: int, **options: Any) -> None:
        super().__init__(SAGEConv, 1)
        self.convs = nn.ModuleList()
        self.gnn = kind(NUM_FEATURES, 5, num_layers, NUM_CLASSES, act="tanh", **options)

    def layers(self) -> Any:
        return layers_of(self.gnn)

    def whole(self, x: Tensor, edges: Tensor, weights: Tensor | None = None) -> Tensor:
        rows: Tensor = self.gnn(x, edges)
        return rows


def made(num_layers: int) -> dict[str, Callable[[], Model]]:
    return {"PyG GCN": lambda: Ready(GCN, num_layers), "PyG JK": lambda: Ready(GraphSAGE, num_layers, jk="cat")}
