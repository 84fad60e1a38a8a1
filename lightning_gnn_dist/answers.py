"""What is answered to an argument that a class or function of this package does not take."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from typing import Any

from lightning_gnn_dist.gone import way_out

_DRAWN = "leave it out: a batch has the edges that were drawn, and one of ClusterSampler all among its nodes"
_MASKS = "nodes are chosen by masks of the graph: data.train_mask, data.val_mask and data.test_mask"
_SPLIT = "LinkDataModule(split_edges(graph, edge_type=..., labels=...)) says which edges are learned, and their labels"
WORDS_OF_PYG = {  # and of torch's DataLoader, with what is written here
    "num_neighbors": "write sampler=NeighborSampler([15, 10])",
    "num_samples": "write sampler=NeighborSampler([15, 10])",
    "replace": "write sampler=NeighborSampler([15, 10], replace=True)",
    "weight_attr": 'write sampler=NeighborSampler([15, 10], weight="edge_weight")',
    "time_attr": 'write sampler=TemporalSampler([15, 10], time="time")',
    "input_time": 'write sampler=TemporalSampler([15, 10], time="time", seed_time="time")',
    "temporal_strategy": 'write sampler=TemporalSampler([15, 10], time="time", pick="latest")',
    "disjoint": "leave it out: ShadowSampler and TemporalSampler draw for each seed apart, others for the batch",
    "directed": _DRAWN,
    "subgraph_type": _DRAWN,
    "input_nodes": _MASKS + "; of a typed graph by the type, write task='paper'",
    "seed_type": "write task='paper', which names a node type, or a task of a database",
    "input_train_nodes": _MASKS,
    "input_val_nodes": _MASKS,
    "input_test_nodes": _MASKS,
    "input_pred_nodes": "leave it out: predictions are of all nodes",
    "edge_label_index": _SPLIT,
    "edge_label": _SPLIT,
    "edge_label_time": 'write LinkDataModule(split_edges(graph, time="edge_time"))',
    "neg_sampling": "write num_negatives=1 of LinkDataModule, negatives for each edge",
    "neg_sampling_ratio": "write num_negatives=1 of LinkDataModule, negatives for each edge",
    "num_workers": "write loading=Loading(num_threads=2): batches are made by threads, which share the graph",
    "prefetch_factor": "leave it out: each thread is a bulk ahead, loading=Loading(num_threads=1, bulk_size=4)",
    "persistent_workers": "leave it out: threads make batches, and need no start",
    "multiprocessing_context": "leave it out: threads make batches",
    "worker_init_fn": "leave it out: what threads draw is decided by the seed",
    "generator": "write seed=0",
    "pin_memory": "leave it out: with a GPU batches come through page-locked memory",
    "shuffle": "leave it out: a pass of training deals the nodes anew, an evaluation takes them in order",
    "drop_last": "leave it out: the batches of a pass are of one size, or one node less",
    "collate_fn": "leave it out, and change batches in the module's on_after_batch_transfer(batch, dataloader_idx)",
    "transform": "leave it out, and change batches in the module's on_after_batch_transfer(batch, dataloader_idx)",
    "is_sorted": "leave it out: a graph is sorted once",
    "share_memory": "leave it out: a saved graph, given by its path, is in memory once for all ranks of a host",
    "num_parts": "leave it out: there is a part for each rank, of which Trainer(devices=...) says how many",
    "data": "the graph or split is the first argument: give it without a name",
}


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the question whether the nearest of some names was meant, behind a space, if one is near."""
    return "".join(f" Did you mean {near!r}?" for near in get_close_matches(name, known, n=1))


def answers_unknown_names(kind: Any) -> Any:
    """Let a class, its class methods, or a function refuse arguments that it does not take by what to write instead."""
    for name, member in [*vars(kind).items()]:
        if isinstance(kind, type) and isinstance(member, classmethod) and name[0] != "_":
            setattr(kind, name, classmethod(answers_unknown_names(member.__func__)))
    known = inspect.signature(kind).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in known.values()):
        return kind  # who it hands them on to says so
    make = kind.__init__ if isinstance(kind, type) else kind  # type: ignore[misc]  # of this class itself

    @wraps(make)
    def checked(*args: Any, **given: Any) -> Any:
        for name in given:
            if name not in known:
                raise TypeError(
                    gone_argument(kind, name) or f"{kind.__qualname__} takes no {name}. {instead_of(kind, name)}"
                )
        return make(*args, **given)

    if not isinstance(kind, type):
        return checked
    kind.__init__ = checked  # type: ignore[misc]  # pickles and isinstance know the class itself
    return kind


def gone_argument(kind: Any, name: str) -> str | None:
    """Return the answer to an argument that a class, one of its bases, or a function had in the release before."""
    owners = [level.__qualname__ for level in getattr(kind, "__mro__", (kind,))]
    return next((said for owner in owners if (said := way_out(f"{owner}.{name}"))), None)


def instead_of(kind: Any, name: str, known: Collection[str] = ()) -> str:
    """Return what to write in the place of an argument that a class or function does not take, as a sentence.

    Args:
        kind: The class or function.
        name: The argument.
        known: What it takes, if not what its signature says.
    """
    parameters = inspect.signature(kind).parameters
    known = known or [each for each in parameters if each != "cls"]
    if name in WORDS_OF_PYG and any(level.__name__ == "LightningDataModule" for level in getattr(kind, "__mro__", ())):
        return f"{WORDS_OF_PYG[name][0].upper()}{WORDS_OF_PYG[name][1:]}."
    for setting, value in ((each, parameter.default) for each, parameter in parameters.items()):
        if is_dataclass(value) and name in {field.name for field in fields(value)}:
            return f"It is a field of {setting}, write {setting}={type(value).__name__}({name}=...)."
    package = sys.modules[__name__.partition(".")[0]]
    others = [each for each in package.__all__ if name in inspect.signature(getattr(package, each)).parameters]
    takes = f"It is an argument of {', '.join(others[:5])}." if others else f"It takes {', '.join(known) or 'nothing'}."
    return did_you_mean(name, known).strip() or takes
