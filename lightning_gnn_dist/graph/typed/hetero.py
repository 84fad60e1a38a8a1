"""From what PyG holds to tables of nodes and edges, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_at_least, check_plain, check_tensor, shown
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.typed.build import EdgeTable, NodeTable, build
from lightning_gnn_dist.graph.typed.types import EDGE, NODE, EdgeType, check_names, within

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

Content = dict[str, Any]  # arrays by name, num_nodes, edge_index
Needed = Collection[str | None]  # names of arrays
_NO_ARRAYS = {"num_nodes", "edge_index", "adj_t"}


def graph_of(data: Any, *, check_features: bool, float_labels: bool, edge_ids: bool, time: str | None) -> Graph:
    """The graph of a ``Data`` or ``HeteroData``; what cannot be trained on is refused."""
    from torch_geometric.data import Data, HeteroData  # two seconds, and saved graphs need none of it

    if not isinstance(data, Data | HeteroData):
        way_out = " Read a pair of stores into a HeteroData, whole." if isinstance(data, tuple) else ""
        raise TypeError(
            f"data must be a torch_geometric.data.Data, for Graph.from_pyg(data), got {shown(data)}.{way_out}"
        )
    nodes, edges = contents_of(data)
    if time is not None and not any(nodes):
        raise ValueError(f"time ({shown(time)}) orders the edges of a HeteroData: leave it out for a Data.")
    # Refused where it is no tensor: left out, a type would seem to have no such array, and edges without times are
    # always seen.
    of_all = [*nodes.values(), *edges.values()]
    needed = {name for content in of_all for name, value in content.items() if isinstance(value, Tensor)} | {time}
    found, links = dict[str, NodeTable](), dict[EdgeType, EdgeTable]()
    for kind, content in nodes.items():
        with within(kind):
            tensors = dict(tensors_of(content, needed))
            count = count_of(content, tensors)
            arrays = convert.with_masks(tensors, count)
            convert.check_each_name(arrays, allowed=())
            convert.check_rows("node", arrays, count)
            is_target = float_labels and (not kind or ("y" in arrays and arrays["y"].is_floating_point()))
            of = f"type {kind!r}" if kind else "the graph"
            arrays = convert.learnable(arrays, of, check_features=check_features, float_labels=is_target)
            found[kind] = NodeTable(count, arrays)
    labels = [table.arrays["y"] for table in found.values() if "y" in table.arrays]
    if float_labels and any(nodes) and not any(y.is_floating_point() for y in labels):
        raise ValueError("float_labels says that a y is a target of regression, but no node type has a y of fractions.")
    for edge_type, content in edges.items():
        with within(edge_type):
            edge_index = edge_index_of(content)
            arrays = {name: array.contiguous() for name, array in tensors_of(content, needed)}
            convert.check_each_name(arrays, allowed=())
            for name, array in arrays.items() if check_features else ():
                convert.check_finite(array, name=name, row="edge")
            ids = {convert.EDGE_IDS: torch.arange(edge_index.shape[1])} if edge_ids else {}
            links[edge_type] = EdgeTable(edge_index, ids | arrays)
    if not any(nodes):
        convert.check_names(*(t.arrays for t in found.values()), *(t.arrays for t in links.values()))
    return typed_graph(*build(found, links, time))


def contents_of(data: Data | HeteroData) -> tuple[dict[str, Content], dict[EdgeType, Content]]:
    """What is set of each node type and each edge type; a ``Data`` is of one type of each, whose names are empty."""
    from torch_geometric.data import HeteroData

    if not isinstance(data, HeteroData):
        content: Content = data.to_dict() | {"num_nodes": data.num_nodes}
        of_edges = {name: value for name, value in content.items() if convert.is_of_edges(name)}
        of_nodes = {name: value for name, value in content.items() if name not in of_edges}
        return {NODE: of_nodes}, {EDGE: of_edges}
    if stray := [name for name, value in data._global_store.items() if isinstance(value, Tensor)]:
        raise ValueError(f"{stray} belong to no type: set them on one, as in data['paper'].x, or remove them.")
    check_names(tuple(data.node_types), tuple(data.edge_types))
    return {k: data[k].to_dict() for k in data.node_types}, {k: data[k].to_dict() for k in data.edge_types}


def count_of(content: Content, tensors: Mapping[str, Tensor]) -> int:
    """The number of nodes: as the data says, or as its arrays show."""
    if (count := content.get("num_nodes")) is not None:
        check_at_least(0, num_nodes=count)
        return int(count)
    lengths = [len(array) for name, array in tensors.items() if name not in convert.SPLITS and array.dim()]
    if not lengths:
        raise ValueError("nothing says how many nodes there are: set data.num_nodes.")
    return lengths[0]


def edge_index_of(content: Content) -> Tensor:
    """The ends of the edges of a type; what is no list of edges is refused."""
    edge_index: Tensor | None = content.get("edge_index")
    if edge_index is None:
        raise ValueError(
            "there is no edge_index: set data.edge_index, of shape (2, E). Of adj_t nothing is read: keep edge_index "
            "beside it, as T.ToSparseTensor(remove_edge_index=False) does."
        )
    convert.check_pairs(edge_index)
    return edge_index.detach()


def tensors_of(content: Mapping[str, Any], needed: Needed = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of what PyG holds of nodes or edges, but for ``edge_index``, on the CPU, without gradients.

    Refuse what is no tensor under one of the ``needed`` names, and under one that a model reads.
    """
    for name, value in content.items():
        if name in needed and name not in _NO_ARRAYS and value is not None:
            check_tensor(f"data.{name}", value, "one number or row for each node, or each edge")
        is_meant = name in ("x", "y", "edge_attr", "edge_weight") or name.endswith("_mask")  # a model would miss it
        if isinstance(value, np.ndarray) or (value is not None and is_meant):
            check_tensor(f"data.{name}", value, "one row for each node, or each edge")
        if name in ("edge_index", "adj_t") or not isinstance(value, Tensor):  # T.ToSparseTensor says the edges twice
            continue
        value = value.detach() if value.is_meta else value.detach().cpu()
        check_plain(name, value)
        yield name, value


def to_pyg(graph: Graph) -> Data | HeteroData:
    """The graph as a ``Data``, or with types as a ``HeteroData``, which shares its arrays."""
    from torch_geometric.data import Data, HeteroData

    indptr, indices, types = graph.indptr, graph.indices, graph.types
    if not types.have_names:
        receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
        edge_index, arrays = torch.stack([indices.to(torch.int64), receiver]), graph.node_arrays | graph.edge_arrays
        return Data(edge_index=edge_index, num_nodes=graph.num_nodes, **arrays)
    data = HeteroData()
    for kind, count in types.num_nodes.items():
        data[kind].num_nodes = count
        data[kind].update(dict(types.node_arrays[kind]))
    of_types = torch.argsort(types.edge_type, stable=True).split(list(types.num_edges))
    for edge_type, at in zip(types.edge_types, of_types, strict=True):
        receiver = torch.searchsorted(indptr, at, right=True) - 1 - types.nodes_of(edge_type[2]).start
        sender = indices[at].to(torch.int64) - types.nodes_of(edge_type[0]).start
        data[edge_type].edge_index = torch.stack([sender, receiver])
        data[edge_type].update(dict(types.edge_arrays[edge_type]))
    return data
