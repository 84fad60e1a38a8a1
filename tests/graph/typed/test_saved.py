"""A saved typed graph: the same after opening, refused when its files do not fit each other."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import HeteroData

from lightning_gnn_dist import Graph, citations
from lightning_gnn_dist.graph.storage import store
from tests.graph.typed.graphs import check_same, small


@pytest.fixture
def graph() -> Graph:
    return Graph.from_pyg(small(), edge_ids=True, time="time")


def test_everything_comes_back(graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "graph")
    opened = Graph.open(tmp_path / "graph")
    check_same(opened.to_pyg(), small())
    assert opened.fingerprint == graph.fingerprint and opened.num_bytes == graph.num_bytes
    assert opened.types.about == graph.types.about
    assert len(pickle.dumps(opened)) < 500 and store.verify(tmp_path / "graph") == []
    assert (tmp_path / "graph" / "nodes" / "author" / "x.npy").exists()
    assert (tmp_path / "graph" / "edges" / "paper__cites__paper" / "time.npy").exists()


def test_the_fingerprint_knows_types_and_their_masks() -> None:
    def changed(**arrays: Any) -> HeteroData:
        data = small()
        data["author"].update(arrays)
        return data

    prints = [Graph.from_pyg(data).fingerprint for data in (small(), small().rename("author", "writer"))]
    prints += [Graph.from_pyg(changed(train_mask=torch.arange(7) < 3)).fingerprint]
    assert len({*prints}) == 3 and Graph.from_pyg(changed(x=torch.ones(7, 1))).fingerprint == prints[0]


def test_one_edge_type_takes_no_number_per_edge(tmp_path: Path) -> None:
    data = HeteroData()
    data["a"].num_nodes = 3
    data["a", "to", "a"].edge_index = torch.tensor([[0, 1, 1], [1, 2, 0]])
    graph = Graph.from_pyg(data, edge_ids=True)
    graph.save(tmp_path / "graph")
    assert not (tmp_path / "graph" / "edge_type.npy").exists()
    check_same(Graph.open(tmp_path / "graph").to_pyg(), data)


def test_a_graph_without_types_is_saved_as_older_releases_read_it(tmp_path: Path) -> None:
    Graph.from_edge_index(torch.tensor([[0], [1]]), 2).save(tmp_path / "graph")
    meta = json.loads((tmp_path / "graph" / "meta.json").read_text())
    assert meta["version"] == 1 and "types" not in meta
    Graph.from_pyg(small()).save(tmp_path / "graph", overwrite=True)
    assert json.loads((tmp_path / "graph" / "meta.json").read_text())["version"] == 2


def write(graph: Graph, path: Path, arrays: dict[str, torch.Tensor], **about: Any) -> None:
    store.write(path, graph.arrays | arrays, graph.fingerprint, overwrite=True, types=graph.types.about | about)


@pytest.mark.parametrize(
    ("arrays", "about", "message"),
    [
        ({"edge_type": torch.zeros(99, dtype=torch.uint8)}, {}, "is said to be of type"),
        ({"edge_type": torch.full((99,), 5, dtype=torch.uint8)}, {}, r"edge_type must lie in \[0, 5\), got 5 to 5"),
        (
            {"edge_type": torch.zeros(99, dtype=torch.int32)},
            {},
            r"edge_type must hold torch.uint8.*meta.json|meta.json",
        ),
        ({"nodes/paper/x": torch.ones(3, 2)}, {}, r"data\['paper'\]: x has shape \(3, 2\)"),
        ({}, {"nodes": [["paper", 12], ["author", 7]]}, "names the node type 'venue', which is not there"),
        ({}, {"nodes": [["paper", 12], ["author", 6], ["venue", 4]]}, r"data\['author'\]: x has shape"),
        ({}, {"nodes": [["paper", "x"]]}, "meta.json does not fit"),
        ({}, {"nodes": 3}, "damaged"),
        ({}, {"nodes": [["paper", 12], ["author", 11], ["venue", -1]]}, "No type has fewer than 0 nodes"),
        ({"nodes/film/x": torch.ones(2)}, {}, r"\['nodes/film/x'\] belong to no type"),
        ({"nodes/x": torch.ones(2)}, {}, r"\['nodes/x'\] belong to no type"),
        ({}, {"time": 3}, "damaged"),
    ],
)
def test_files_that_do_not_fit_each_other_are_refused(
    graph: Graph, arrays: dict[str, torch.Tensor], about: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(graph, tmp_path / "graph", arrays, **about)
    for _ in range(2):  # nor does a first refusal leave a mark
        with pytest.raises(ValueError, match=message):
            Graph.open(tmp_path / "graph")


def test_a_row_that_is_not_in_order_of_types_is_refused(graph: Graph) -> None:
    types = graph.types
    assert types is not None
    row = next(v for v in range(12) if types.edge_type[graph.indptr[v] : graph.indptr[v + 1]].unique().numel() > 1)
    at = torch.arange(graph.num_edges)
    at[graph.indptr[row] : graph.indptr[row + 1]] = at[graph.indptr[row] : graph.indptr[row + 1]].flip(0)
    with pytest.raises(ValueError, match="or the row is not in order of types"):
        replace(types, edge_type=types.edge_type[at]).check_edges(graph.indptr, graph.indices[at])


def test_a_changed_array_is_not_saved(graph: Graph, tmp_path: Path) -> None:
    graph.types.node_arrays["paper"]["x"] = torch.ones(3)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"data\['paper'\]: x has shape \(3,\)"):
        graph.save(tmp_path / "graph")


def test_types_cost_less_than_a_third_of_the_edges(tmp_path: Path) -> None:
    typed = citations(2000)
    plain = Graph(typed.indptr, typed.indices)
    typed.save(tmp_path / "typed")
    plain.save(tmp_path / "plain")
    edges = [tmp_path / "typed" / f"{name}.npy" for name in ("indptr", "indices", "edge_type")]
    size = sum(file.stat().st_size for file in edges)
    assert size < 1.3 * sum(file.stat().st_size for file in (tmp_path / "plain").glob("*.npy"))
