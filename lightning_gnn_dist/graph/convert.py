"""Turn an edge list or a PyG ``Data`` into a CSR and its arrays, and refuse what would fail later in training."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.checks import check_at_least, check_tensor, holds_integers, shown

MASKS = ("train_mask", "val_mask", "test_mask")
ROWS_AT_ONCE = 1 << 16
RESERVED = {  # attributes that batches set themselves
    "n_id",
    "batch_size",
    "num_sampled_nodes",
    "num_sampled_edges",
    "blocks",
    "coverage",
    "node_norm",
    "edge_label",
    "edge_label_index",
}


def compress(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The in-neighbour CSR, rows sorted by sender: ``indptr``, ``indices``, and each edge's place in the input."""
    check_at_least(1, num_nodes=num_nodes)
    check_edge_index(edge_index, num_nodes)
    sender, receiver = edge_index.to(torch.int64)
    order = torch.argsort(receiver * num_nodes + sender, stable=True)
    degrees = torch.bincount(receiver, minlength=num_nodes)
    indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    return indptr, sender[order].to(index_dtype(num_nodes)), order


def index_dtype(num_nodes: int) -> torch.dtype:
    """int32 where it holds every node id, otherwise int64."""
    return torch.int32 if num_nodes < 2**31 else torch.int64


def check_edge_index(edge_index: Tensor, num_nodes: int) -> None:
    """Refuse anything but integers of shape (2, E) in ``[0, num_nodes)``."""
    check_tensor("edge_index", edge_index, "shape (2, E)")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or not holds_integers(edge_index):
        raise ValueError(
            f"edge_index must be integers of shape (2, E), got {edge_index.dtype} {tuple(edge_index.shape)}."
        )
    if edge_index.numel() == 0:
        return
    low, high = int(edge_index.min()), int(edge_index.max())
    if low < 0 or high >= num_nodes:
        bad = low if low < 0 else high
        raise ValueError(
            f"edge_index names node {bad}, but the graph has {num_nodes} nodes: ids must lie in [0, {num_nodes})."
        )


def arrays_of(data: Data) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The node arrays and the edge arrays of ``data``; a tensor that is neither is refused."""
    _check_data(data)
    check_names(data.to_dict())
    nodes: dict[str, Tensor] = {}
    edges: dict[str, Tensor] = {}
    for name, value in data.to_dict().items():
        if name == "edge_index" or not isinstance(value, Tensor):
            continue
        if value.layout != torch.strided:
            raise ValueError(
                f"{name} is sparse ({value.layout}): store it dense, data.{name} = data.{name}.to_dense()."
            )
        belongs = data.num_edges if name.startswith("edge_") else data.num_nodes
        if value.dim() == 0 or len(value) != belongs:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but the graph has {data.num_nodes} nodes and "
                f"{data.num_edges} edges: give it one row per node (or per edge, under a name that starts with "
                f"'edge_'), or remove it with `del data.{name}`."
            )
        (edges if name.startswith("edge_") else nodes)[name] = value.detach().cpu().contiguous()
    return nodes, edges


def check_names(names: Collection[str]) -> None:
    """Refuse names that batches use for attributes of their own."""
    if taken := RESERVED & set(names):
        raise ValueError(f"{sorted(taken)} are names that batches use themselves: rename these arrays of the data.")


def _check_data(data: Data) -> None:
    if isinstance(data, HeteroData):
        raise NotImplementedError(
            "HeteroData is not supported yet. data.to_homogeneous() gives a Data whose node_type and edge_type "
            "travel with the graph."
        )
    if not isinstance(data, Data):
        raise TypeError(f"data must be a torch_geometric.data.Data, for Graph.from_pyg(data), got {shown(data)}.")
    if data.edge_index is None:
        raise ValueError("The data has no edge_index. (adj_t is not read: keep edge_index beside it.)")
    if not data.num_nodes:
        raise ValueError("The data has no nodes. Set data.x or data.num_nodes.")


def check_arrays(arrays: dict[str, Tensor], *, check_features: bool, float_labels: bool) -> None:
    """Refuse masks, labels and features that would fail or mislead in training."""
    for name, array in arrays.items():
        if name.endswith("_mask"):
            check_mask(name, array)
    if (y := arrays.get("y")) is not None:
        _check_labels(y, arrays.get("train_mask"), float_labels)
    for name in ("x", "x_scale") if check_features else ():
        if name in arrays:
            check_finite(arrays[name], name=name)


def check_mask(name: str, mask: Tensor) -> None:
    """Refuse a mask that is not one boolean per node."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be boolean, got {mask.dtype}: data.{name} = data.{name}.bool().")
    if mask.dim() != 1:
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}, one column per split: choose one, data.{name} = data.{name}[:, 0]."
        )


def _check_labels(y: Tensor, train_mask: Tensor | None, float_labels: bool) -> None:
    one_per_node = y.dim() == 1 or y.shape[1:].numel() == 1
    if y.is_floating_point() and one_per_node and not float_labels:
        raise ValueError(
            f"y holds one {y.dtype} per node, but classes are integers: data.y = data.y.long(). "
            "If the task is regression, say so: Graph.from_pyg(data, float_labels=True)."
        )
    if y.is_floating_point() or y.dim() != 1 or train_mask is None:
        return
    unlabelled = (y < 0) & train_mask
    if unlabelled.any():
        raise ValueError(
            f"train_mask marks {int(unlabelled.sum())} nodes whose label is negative (the first is node "
            f"{int(unlabelled.nonzero()[0])}): train_mask must mark labelled nodes, data.train_mask &= data.y >= 0."
        )


def check_finite(x: Tensor, first: int = 0, *, name: str = "x", row: str = "node") -> None:
    """Refuse NaN and infinity. The error calls a row a ``row``, such as ``"node"``, and numbers them from ``first``."""
    if not (x.is_floating_point() or x.is_complex()):
        return
    for start in range(0, len(x), ROWS_AT_ONCE):
        rows = x[start : start + ROWS_AT_ONCE]
        if not bool(torch.isfinite(rows).all()):
            at = first + start + int((~torch.isfinite(rows.reshape(len(rows), -1))).any(1).nonzero()[0])
            otherwise = (
                "" if row != "node" else ", or switch this check off: Graph.from_pyg(data, check_features=False)"
            )
            raise ValueError(
                f"{name} holds NaN or infinite values (the first at {row} {at}): replace them, for instance by "
                f"torch.nan_to_num(data.{name}){otherwise}."
            )
