"""What ``torch.export`` makes of a module by its layers: the same rows on graphs of any size, without this package."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export, load, save
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GAT, GCN, GIN, GATConv, GraphSAGE, SAGEConv

from lightning_gnn_dist import layers_of, through_layers

WIDTH, CLASSES = 4, 3
EDGE_TYPES = [("author", "writes", "paper"), ("paper", "cites", "paper")]


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


SLOW = {ByHand: [GATConv], ReadyMade: [GraphSAGE, GAT, GIN]}


@pytest.mark.filterwarnings("ignore")  # torch's own, of export
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (ByHand, SAGEConv),
        (ReadyMade, GCN),
        *(pytest.param(make, kind, marks=pytest.mark.slow) for make, kinds in SLOW.items() for kind in kinds),
    ],
)
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


class Typed(nn.Module):
    """A layer for each edge type."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(WIDTH, CLASSES) for _ in EDGE_TYPES])

    def layers(self) -> list[Any]:
        def only(batch: Any) -> dict[str, Tensor]:
            of_types = zip(self.convs, EDGE_TYPES, strict=True)
            return {"paper": sum(c((batch[k[0]].x, batch["paper"].x), batch[k].edge_index) for c, k in of_types)}

        return [only]


class OnTensorsOfTypes(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: dict[str, Tensor], edges: dict[str, Tensor]) -> Any:
        data = HeteroData({kind: {"x": rows} for kind, rows in x.items()})
        for kind, ends in edges.items():
            data[tuple(kind.split("__"))].edge_index = ends
        return through_layers(self.module, data)["paper"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_module_of_types_is_exported_with_dicts(tmp_path: Path) -> None:
    def graph(authors: int, papers: int) -> tuple[Any, Any]:
        ends = [torch.randint(0, min(authors, papers), (2, 20 + n)) for n in range(2)]
        x = {"author": torch.randn(authors, WIDTH), "paper": torch.randn(papers, WIDTH)}
        return x, dict(zip(("__".join(kind) for kind in EDGE_TYPES), ends, strict=True))

    module, given = Typed(), graph(5, 9)
    shapes = {"x": {kind: {0: Dim(kind, min=2)} for kind in given[0]}}
    shapes["edges"] = {kind: {1: Dim(kind, min=2)} for kind in given[1]}
    program = export(OnTensorsOfTypes(module), given, dynamic_shapes=shapes, strict=False)
    for other in (given, graph(30, 7)):
        torch.testing.assert_close(program.module()(*other), OnTensorsOfTypes(module)(*other), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_layers_that_read_blocks_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="blocks"):
        exported(ByHand(SAGEConv, reads="blocks"), tmp_path / "model.pt2")
