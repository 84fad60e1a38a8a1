"""Opens saved graphs, and saves graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lightning_gnn_dist.checks import check_arrays
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.rows import check_form
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.graph.user_ids import all_ids


def open_graph(path: Path, num_senders: int | None = None, seeds: str | None = None) -> Graph:
    """Map a saved graph.

    Args:
        path: The directory.
        num_senders: The entries of ``indices`` lie below this. Default: its number of rows.
        seeds: The node type that a typed graph is learned from, if one was chosen.
    """
    inode = path.stat().st_ino if path.exists() else None
    read = store.read(path, num_senders)
    if path.stat().st_ino != inode:  # it was replaced while it was read: what was read may be of both
        read = store.read(path, num_senders)
    arrays, fingerprint, types = read
    if missing := {"indptr", "indices"} - arrays.keys():
        raise ValueError(f"{path} holds no {min(missing)}.npy that its meta.json knows of: save the graph again.")
    rows = arrays["indptr"], arrays["indices"]
    if types is None:
        nodes, edges = store.arrays_below("nodes/", arrays), store.arrays_below("edges/", arrays)
        convert.check_names(nodes, edges, allowed=("n_id",))
        types = GraphTypes.of_one(*rows, nodes, edges, num_senders)
    return typed_graph(*rows, types if seeds is None else types.with_seeds(seeds), path.resolve(), fingerprint)


def save_graph(graph: Graph, path: Path, beside: Mapping[str, Tensor], *, overwrite: bool) -> None:
    """Write a graph, and further arrays beside it, to a directory."""
    arrays = graph.arrays
    check_arrays(beside=beside, arrays=arrays)  # they may have changed
    check_form(graph.indptr, graph.indices)
    graph.types.check_fits(graph.num_nodes, graph.num_edges)
    graph.types.__post_init__()
    graph.check_edges()
    if graph.path is not None and path.resolve() == graph.path:
        raise ValueError(f"The graph is read from {path} itself: save it to another path.")
    if twice := sorted(arrays.keys() & beside.keys()):
        raise ValueError(f"beside holds {twice}, which are arrays of the graph itself: call them links/...")
    about = graph.types.about if graph.types.have_names else None
    ids = {} if beside else all_ids(graph.path, graph.types.node_types)
    store.write(path, arrays | dict(beside), graph.fingerprint, overwrite=overwrite, types=about, ids=ids)
