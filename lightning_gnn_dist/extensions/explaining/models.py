"""What is wrong with features, labels or a table of embeddings, put into the error of the model that met it."""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_gnn_dist.batches.batch import LABELS, SampledData, SampledHeteroData
from lightning_gnn_dist.batches.seed_batch import SeedsOnly
from lightning_gnn_dist.graph.graph import Graph

_OURS = __name__.split(".")[0] + "."
_OF_CLASSES = re.compile(
    "multi-target not|class probabilities, got Long|`preds` and `target` should have the same shape"
)


def explain(exception: BaseException, rows: Graph | None) -> None:
    """Say in an error of a model what is wrong with what it was given.

    Args:
        exception: The error.
        rows: The rows of the graph that this process has.
    """
    explain_features(exception, None if rows is None or rows.types.have_names else rows.node_arrays.get("x"))
    explain_labels(exception)
    explain_tables(exception)


def explain_features(exception: BaseException, x: Tensor | None) -> None:
    """Put what is wrong with the features ``x`` into the error of a layer: torch speaks of two matrices only.

    This cannot be checked before the model runs: a table of embeddings, for instance, takes integers.
    """
    if x is None:
        _explain_no_features(exception)
        return
    text, places = str(exception), [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    is_theirs = bool(places) and places[-1].f_globals.get("__name__", "").startswith(("torch.", "torch_geometric."))
    if reason := _of_type(x, text) or _of_width(x, text) or (_of_shape(x) if is_theirs else None):
        exception.args = (f"{reason} ({' '.join(text.split())})",)


def _explain_no_features(exception: BaseException) -> None:
    """Say in the error of a layer that it was given None, if the batch has no features."""
    frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    batches = [held for frame in frames for held in frame.f_locals.values() if isinstance(held, SampledData)]
    if "NoneType" in str(exception) and any("x" not in batch for batch in batches):
        exception.args = (
            "The graph has no features, and batch.x is None: set data.x before Graph.from_pyg(data), one row for each "
            "node, or learn a row for each, torch.nn.Embedding(num_nodes, 64)(batch.n_id), or OwnedEmbedding on "
            f"several ranks. ({' '.join(str(exception).split())})",
        )


def explain_labels(exception: BaseException) -> None:
    """Say in the error of a loss or a metric that a batch has labels of its seeds alone, if that is the reason."""
    text, frames = str(exception), [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    numbers = {int(number) for number in re.findall(r"\d+", text)}
    if frames and frames[-1].f_globals.get("__name__", "").startswith(_OURS):  # it says itself what is wrong
        return
    for frame in frames:
        for held in frame.f_locals.values():
            batch, name = _with_labels(held)
            if batch is None:
                continue
            if _lacks_labels(batch) and _is_about(batch, text, numbers):
                told = (
                    f"{name}.y holds the labels of the {batch.batch_size} seeds, the first nodes of the batch, and not "
                    f"those of its {batch.num_nodes - batch.batch_size} other nodes, which may be validation or test "
                    f"nodes: compare out[:batch.batch_size] with {name}.y[:batch.batch_size], without masks. For label "
                    "propagation, loading=Loading(all_labels=True) gives the labels of all."
                )
            elif LABELS in batch and batch.y.dim() == 2 and _OF_CLASSES.search(text):
                told = (
                    f"{name}.y has {batch.y.shape[1]} columns, and a loss or a metric of classes takes one: choose it, "
                    "data.y = data.y[:, 0] before Graph.from_pyg(data), or take those of several labels, such as "
                    "binary_cross_entropy_with_logits."
                )
            else:
                continue
            exception.args = (f"{told} ({' '.join(text.split())})",)
            return


def explain_tables(exception: BaseException) -> None:
    """Say in the error of a table of embeddings which one it is, how many rows it has, and which are asked for."""
    frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    modules = [held for frame in frames for held in frame.f_locals.values() if isinstance(held, LightningModule)]
    for frame in frames:
        table, ids = frame.f_locals.get("self"), frame.f_locals.get("input")
        if not isinstance(exception, IndexError) or not isinstance(table, nn.Embedding) or not isinstance(ids, Tensor):
            continue
        names = [name for module in modules[:1] for name, each in module.named_modules() if each is table]
        exception.args = (
            f"{names[0] if names else 'A table'} has {table.num_embeddings:,} rows, nn.Embedding("
            f"{table.num_embeddings}, {table.embedding_dim}), and rows {int(ids.min())} to {int(ids.max())} were asked "
            "for: give it a row for each id that there can be, nn.Embedding(graph.num_nodes, ...) for batch.n_id, and "
            f"num_nodes of its type for that of a type. ({' '.join(str(exception).split())})",
        )
        return


def _with_labels(held: object) -> tuple[Any, str]:
    """A batch, or the seeds' type in it, and how it is called; None for anything else.

    One that nobody has read is left alone: to look would sample it, maybe from ranks that are gone.
    """
    if isinstance(held, SeedsOnly) and not held.neighbourhood.is_read:
        return None, ""
    if isinstance(held, SampledHeteroData) and isinstance(held.seed_type, str):
        return held[held.seed_type], f"batch[{held.seed_type!r}]"
    return (held if isinstance(held, SampledData) else None), "batch"


def _lacks_labels(batch: Any) -> bool:
    return LABELS in batch and len(batch.y) == batch.batch_size < batch.num_nodes


def _is_about(batch: Any, text: str, numbers: set[int]) -> bool:
    """Whether an error speaks of the lengths of outputs and labels."""
    if batch.batch_size in numbers:
        return batch.num_nodes in numbers or "out of bounds" in text or "batch_size" in text
    return "`preds` and `target`" in text  # torchmetrics leaves the numbers out


def _of_type(x: Tensor, text: str) -> str | None:
    if x.dtype == torch.float32 or not re.search(
        "same dtype|can't be cast|not supported for|not implemented for", text
    ):
        return None
    return (
        f"x holds {x.dtype}, and the model computes with another type: data.x = data.x.float() before "
        "Graph.from_pyg(data), or turn batch.x into what the model takes."
    )


def _of_width(x: Tensor, text: str) -> str | None:
    found = re.search(r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", text)
    if not found or x.dim() != 2 or int(found[1]) != x.shape[1]:
        return None
    return f"x has {found[1]} features, and a layer of the model takes {found[2]}: build it with {found[1]}."


def _of_shape(x: Tensor) -> str | None:
    if x.dim() == 2:
        return None
    way_out = "view(-1, 1)" if x.dim() == 1 else "flatten(1)"
    return (
        f"x has the shape {tuple(x.shape)}, and a layer takes a row of features for each node: "
        f"data.x = data.x.{way_out} before Graph.from_pyg(data), or give batch.x that shape."
    )
