"""What arrays of nodes and edges may hold; what would fail in training is refused."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    check_at_least,
    check_fits,
    check_ids,
    check_plain,
    check_tensor,
    holds_integers,
    is_integer,
    shown,
)

log = logging.getLogger(__name__)

MAX_NAME = 200  # bytes: an array is the name of a file, a type that of a folder
NAME = re.compile(r"\w[^/\\\0\n]*")  # of an array or a type
EDGE_IDS = "e_id"
MASKS = ("train_mask", "val_mask", "test_mask")
SPLITS = {"train_idx": "train_mask", "val_idx": "val_mask", "valid_idx": "val_mask", "test_idx": "test_mask"}
NUMBERS_AT_ONCE = 1 << 22  # bounds what is read of a memory map at a time
BYTES_PER_NODE = 24  # while rows are counted
MAX_NODES = 3_037_000_499  # whose square is below 2**63, so that an edge is one number
RESERVED = {  # what batches write themselves, and what PyG's Data counts
    *("n_id", "batch_size", "num_sampled_nodes", "num_sampled_edges", "blocks", "coverage", "weighed_by_coverage"),
    *("node_norm", "is_filler", "num_targets", "input_id", "edge_label", "edge_label_index", "edge_index", "num_nodes"),
    "num_edges",
}


def check_num_nodes(num_nodes: int) -> None:
    """Refuse a number of nodes that edges cannot be made of, or that this machine cannot hold."""
    check_at_least(1, most=MAX_NODES, num_nodes=num_nodes)
    check_fits(BYTES_PER_NODE * int(num_nodes), f"num_nodes ({num_nodes:,}): a graph of so many nodes")


def index_dtype(num_nodes: int) -> torch.dtype:
    """int32 where it holds every node id, otherwise int64."""
    return torch.int32 if num_nodes < 2**31 else torch.int64


def check_pairs(edge_index: Tensor) -> None:
    """Refuse anything but integers of shape (2, E)."""
    check_tensor("edge_index", edge_index, "shape (2, E)")
    check_plain("edge_index", edge_index)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or not holds_integers(edge_index):
        raise ValueError(
            f"edge_index must be integers of shape (2, E), got {edge_index.dtype} {tuple(edge_index.shape)}."
        )


def distinct_ids(name: str, value: object, count: int) -> Tensor:
    """Return a list or a tensor of ids of ``count`` nodes as a tensor; refuse ids that are none, or there twice."""
    is_list = isinstance(value, list | tuple | range) and all(map(is_integer, value))
    given: Any = torch.tensor(value, dtype=torch.int64) if is_list else value
    check_ids(name, given)
    assert isinstance(given, Tensor)
    if given.numel() == 0:
        raise ValueError(f"{name} is empty: name a node at least, or leave {name} out for all of them.")
    outside = given[(given < 0) | (given >= count)]
    if outside.numel():
        raise ValueError(f"{name} must lie in [0, {count}), got {int(outside[0])}.")
    distinct, counts = given.unique(return_counts=True)
    if distinct.numel() != given.numel():
        raise ValueError(f"{name} must be distinct, got {int(distinct[counts > 1][0])} more than once.")
    return given.to(torch.int64)


def with_masks(tensors: Mapping[str, Tensor], num_nodes: int) -> dict[str, Tensor]:
    """The arrays of nodes, with a mask in the place of each split by ids, which is refused if its ids are none."""
    arrays: dict[str, Tensor] = {}
    for name, ids in tensors.items():
        if name not in SPLITS:
            arrays[name] = ids.contiguous()
            continue
        check_ids(f"data.{name}", ids)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_nodes:
            raise ValueError(
                f"{name} must hold ids of nodes, in [0, {num_nodes}), got {int(ids.min())} to {int(ids.max())}."
            )
        mask = torch.zeros(num_nodes, dtype=torch.bool)
        mask[ids.to(torch.int64)] = True
        if ids.numel() > int(mask.sum()):  # a mask, and each pass of training and evaluation, has a node once
            raise ValueError(
                f"data.{name} lists {ids.numel()} nodes and names {int(mask.sum())}, some of them repeatedly, and a "
                f"pass has each once: give data.{name}.unique(). To learn more from some nodes, weigh their losses, by "
                "class or by an array of nodes such as data.loss_weight, of which batches have the rows."
            )
        own = arrays.get(SPLITS[name], tensors.get(SPLITS[name]))
        if own is not None and not (own.shape == mask.shape and own.cpu().equal(mask)):
            raise ValueError(
                f"data.{name} names {int(mask.sum())} nodes, and data.{SPLITS[name]} marks others: keep one of them, "
                f"as by `del data.{name}`."
            )
        arrays[SPLITS[name]] = mask
    return arrays


def is_of_edges(name: str) -> bool:
    """Whether an array of this name has a row for each edge."""
    return name.startswith("edge_") or name == EDGE_IDS


def is_unlabelled(y: Tensor) -> Tensor:
    """Which rows of labels are NaN in every column."""
    return y.isnan().reshape(len(y), -1).all(1)


def check_rows(kind: str, arrays: Mapping[str, Tensor], length: int) -> None:
    """Refuse an array without ``length`` rows; of ``"node"``s, not of ``"edge"``s, masks that are none."""
    for name, array in arrays.items():
        if array.dim() == 0 or len(array) != length:
            ways_out = "; one of edges has a name that begins with 'edge_'" if kind == "node" else ""
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}, but the graph has {length} {kind}s: "
                f"an array of {kind}s needs one row per {kind}{ways_out}."
            )
        if array.shape[1:].numel() == 0:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, rows without a number: leave it out.")
        scale = arrays.get(f"{name}_scale") if array.dtype == torch.int8 else None
        if scale is not None and scale.is_floating_point() and scale.numel() == length:
            shape = ", ".join(["-1", *["1"] * (array.dim() - 1)])
            raise ValueError(  # a release before multiplied them
                f"{name} is int8, and nothing multiplies it with {name}_scale any more, so store ({name} * "
                f"{name}_scale.view({shape})).half() as {name} and leave {name}_scale out: batches widen float16."
            )
    for name, array in arrays.items() if kind == "node" else ():
        if name.endswith("_mask") and array.dtype != torch.bool:
            raise ValueError(f"{name} must be boolean, got {array.dtype}: data.{name} = data.{name}.bool().")
        if name.endswith("_mask") and array.dim() != 1:
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}, one column per split: choose one, data.{name} = "
                f"data.{name}[:, 0]."
            )


def masks_of(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks among some arrays, by name."""
    return {name: array for name, array in sorted(arrays.items()) if name.endswith("_mask")}


def check_names(nodes: Collection[str], edges: Collection[str], *, allowed: Collection[str] = ()) -> None:
    """Refuse names that batches need, that files cannot have, and one name for two things."""
    check_each_name([*nodes, *edges], allowed=allowed)
    of_nodes = [name for name in edges if name in ("x", "y", *nodes) or name.endswith("_mask")]
    if wrong := sorted([*of_nodes, *filter(is_of_edges, nodes)]):
        raise ValueError(
            f"{wrong} would be taken for arrays of nodes and of edges: what edges carry has a name of its own, such "
            "as 'edge_attr', and what nodes carry one that does not begin with 'edge_'. Rename these arrays."
        )


def check_each_name(names: Collection[str], *, allowed: Collection[str]) -> None:
    """Refuse names that batches need, and that files cannot have."""
    for name in names:
        if not NAME.fullmatch(name) or len(name.encode(errors="surrogatepass")) > MAX_NAME:
            raise ValueError(
                f"{shown(name)} cannot be the name of an array, nor of its file: start it with a letter, use neither "
                f"slashes nor line ends, and at most {MAX_NAME} bytes."
            )
    if taken := sorted(RESERVED.difference(allowed).intersection(names)):
        raise ValueError(f"{taken} are names that batches use themselves: rename these arrays of the data.")


def learnable(
    arrays: dict[str, Tensor],
    of: str,
    *,
    check_features: bool,
    float_labels: bool,
    without: Tensor | None = None,
) -> dict[str, Tensor]:
    """Arrays of nodes, of checked lengths, as training takes them. What would fail or mislead there is refused.

    Classes of shape (N, 1), as OGB has them, become those of shape (N,). Masks leave out nodes whose label is NaN in
    every column, for NaN stands for no label: a warning counts them.

    Args:
        arrays: The arrays by name.
        of: What these are arrays of, in words.
        check_features: Whether features must be finite.
        float_labels: Whether ``y`` is a target of regression.
        without: Which nodes have no label, if ``y`` is not here to tell.
    """
    if check_features and "x" in arrays:
        check_finite(arrays["x"])
    if (y := arrays.get("y")) is not None:
        if y.dim() == 2 and y.shape[1] == 1 and holds_integers(y):
            y = arrays["y"] = y[:, 0]
        _check_labels(y, arrays.get("train_mask"), float_labels=float_labels)
        if without is None and y.is_floating_point() and y.dim():
            without = is_unlabelled(y)
    if without is not None:
        unlabelled = {name: int((arrays[name] & without).sum()) for name in MASKS if name in arrays}
        arrays = arrays | {name: arrays[name] & ~without for name in unlabelled}
        if found := [f"{count:,} nodes of {name}" for name, count in unlabelled.items() if count]:
            log.warning(
                "%s of %s have NaN for a label, and are left out of it: they are in no loss and no metric",
                ", ".join(found),
                of,
            )
    warn_of_overlaps(arrays)
    return arrays


def _check_labels(y: Tensor, train_mask: Tensor | None, *, float_labels: bool) -> None:
    if y.is_complex():
        raise ValueError(f"y must hold classes or real numbers, got {shown(y)}: give its parts as columns.")
    one_per_node = y.dim() == 1 or y.shape[1:].numel() == 1
    if float_labels and not y.is_floating_point():
        raise ValueError(
            f"float_labels says that y is a target of regression, but y holds {y.dtype} (words were counted as "
            "classes): leave float_labels out, or give numbers with a fraction, data.y = data.y.float()."
        )
    if y.is_floating_point() and one_per_node and not float_labels:
        way_out = "data.y.nan_to_num(-1).long(), where -1 is no label" if y.isnan().any() else "data.y.long()"
        raise ValueError(
            f"y holds one {y.dtype} per node, but classes are integers: data.y = {way_out}. If the task is regression, "
            "say so: Graph.from_pyg(data, float_labels=True), or --float-labels."
        )
    if y.is_floating_point() or y.dim() != 1 or train_mask is None:
        return
    unlabelled = (y < 0) & train_mask
    if unlabelled.any():
        raise ValueError(
            f"train_mask marks {int(unlabelled.sum())} nodes whose label is negative (the first is node "
            f"{int(unlabelled.nonzero()[0])}): train_mask must mark labelled nodes, data.train_mask &= data.y >= 0."
        )


def warn_of_overlaps(arrays: Mapping[str, Tensor]) -> None:
    """Tell whoever judges a model by nodes that it was trained on."""
    masks = [name for name in MASKS if name in arrays]
    counts = {(a, b): int((arrays[a] & arrays[b]).sum()) for a, b in combinations(masks, 2)}
    if found := [f"{a} and {b} share {count:,} nodes" for (a, b), count in counts.items() if count]:
        log.warning("%s: figures on these nodes say little about others", "; ".join(found))


def first_bad(array: Tensor | None) -> int | None:
    """The first row with a number that is not finite, or None. One pass, in pieces."""
    if array is None or not (array.is_floating_point() or array.is_complex()) or not array.numel():
        return None
    rows = max(1, NUMBERS_AT_ONCE * len(array) // array.numel())
    for start in range(0, len(array), rows):
        piece = array[start : start + rows]
        if not bool(piece.sum().isfinite()):  # a sum keeps NaN and infinity, and is as fast as memory
            bad = ~piece.isfinite().reshape(len(piece), -1).all(1)  # none, if large numbers have overflowed the sum
            if bool(bad.any()):
                return start + int(bad.nonzero()[0])
    return None


def check_finite(x: Tensor, first: int = 0, *, name: str = "x", row: str = "node") -> None:
    """Refuse NaN and infinity. The error calls a row a ``row``, such as ``"node"``, and numbers them from ``first``."""
    if (at := first_bad(x)) is None:
        return
    otherwise = ""
    if row == "edge" and name != "edge_weight":
        if bool(x.isnan().any()):
            otherwise = " If NaN stands for no label, Graph.from_pyg(data, check_features=False) lets it in."
        if x.dim() == 1:
            otherwise += f" If these are times, {without_time(row)}: 0 may lie before them, and would be seen."
    raise ValueError(
        f"{name} holds NaN or infinite values (the first at {row} {first + at}): replace them, for instance by "
        f"torch.nan_to_num({name}).{otherwise}"
    )


def check_time(arrays: Mapping[str, Tensor], time: str | None, row: str) -> None:
    """Refuse times, if there are any, that are not one number for each ``row``, such as ``"node"``, or are NaN."""
    if time is None or (times := arrays.get(time)) is None:
        return
    if times.dim() != 1 or times.dtype == torch.bool or times.is_complex():
        raise ValueError(f"{time} must hold one number for each {row}, by which they are ordered, got {shown(times)}.")
    if times.is_floating_point() and bool((bad := times.isnan()).any()):
        raise ValueError(
            f"{time} of {row} {int(bad.nonzero()[0])} is NaN, and {row}s are ordered by it: {without_time(row)}."
        )


def without_time(row: str) -> str:
    """What to do with a ``row`` that has no time, such as ``"edge"``."""
    return f"leave the {row} out, or give it a time later than those of all seeds"


def fingerprint_of(arrays: Iterable[tuple[str, torch.dtype, Sequence[int], Iterable[Tensor]]]) -> str:
    """The hash of ``indptr``, ``indices`` and the masks, each given as name, type, shape and pieces of its content."""
    digest = hashlib.blake2b(digest_size=16)
    for name, dtype, shape, pieces in arrays:
        digest.update(f"{name} {dtype} {tuple(shape)}".encode())
        for piece in pieces:
            digest.update(piece.contiguous().numpy().data)
    return digest.hexdigest()
