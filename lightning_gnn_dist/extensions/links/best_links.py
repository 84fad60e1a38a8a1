"""The best new links of some nodes: the receivers that a model scores highest among all, which a recommender shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_gnn_dist.checks import (
    check_at_least,
    check_choice,
    check_instance,
    check_list,
    check_path,
    check_true_or_false,
)
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.extensions.links.search import BestLinks, LeftOut, Links, LinkSearch, Score
from lightning_gnn_dist.extensions.passes.prediction import check_budget, check_options, predict_once
from lightning_gnn_dist.graph.convert import distinct_ids
from lightning_gnn_dist.graph.storage.parquet_rows import check_ids_of, check_no_file, check_rows_file
from lightning_gnn_dist.graph.storage.store import holds_shards
from lightning_gnn_dist.graph.typed.names import TypeNames, have_names
from lightning_gnn_dist.homes.run import type_of_model
from lightning_gnn_dist.layers.model_layers import layers_of_model
from lightning_gnn_dist.layers.through_layers import has_layers, layers_in
from lightning_gnn_dist.names import extension


def best_links(
    trainer: Trainer,
    model: LightningModule,
    split: LinkSplit | str | Path,
    path: str | Path | None = None,
    *,
    senders: Sequence[int] | Tensor | None = None,
    k: int = 10,
    score: Score = "model",
    leave_out: Sequence[LeftOut] = ("edges", "self"),
    budget_bytes: int | None = None,
    overwrite: bool = False,
    ids_of: str | Path | None = None,
    **options: Any,
) -> BestLinks | None:
    """Find the receivers with the highest scores for each of some senders among all; all ranks share the work.

        best_links(trainer, model, split, "links.npy", senders=[3, 141], k=10, ckpt_path="best.ckpt")

    It is exact: each sender is scored with each receiver, by rows that the layers of the model compute once for all
    nodes. Of equal scores the receiver with the lower id comes first; a score of minus infinity proposes nothing. The
    file has records ``sender``, ``receiver`` and ``score``, ``k`` for each sender in their order, ids being those in
    their types. A rank holds the rows of its own nodes, in a file where they take more than a fifth of the budget, and
    the scores of a block of senders with a chunk of its receivers.

    Args:
        trainer: Starts the ranks, places the model and sets the precision.
        model: A module with a method ``layers``, see :class:`HasLayers`, or with one of PyG's models in it.
        split: The links, or the path of a saved split, or of shards of one. Of a graph without held edges it is
            ``LinkSplit(graph, {})``.
        path: The file, ``.npy``, or a table, ``.parquet`` or ``.csv``, which has no rows for receivers that are not
            there. It appears when it is complete. With None, each rank returns its share of the senders.
        senders: Ids of nodes of the type that sends. Default: all of them.
        k: How many receivers to find for each; no more than there are nodes that may receive.
        score: ``"model"`` calls ``forward()`` of the module with batches of pairs, as a step does; ``"dot"`` takes dot
            products of the rows of both ends, at far less cost.
        leave_out: Which pairs are not proposed: ``"edges"`` of the graph, held edges (``"val"``, ``"test"``), and a
            node for itself, ``"self"``.
        budget_bytes: Bytes that the work may take on each rank, as for :func:`predict_by_layer`. Default: 1 GiB of RAM,
            and half of what is free on a GPU.
        overwrite: Replace an existing file.
        ids_of: For a table, the prepared graph whose ids nodes have: the one that was split. Default: the graph.
        options: Passed to ``trainer.predict``: ``ckpt_path``, ``weights_only``.
    """
    check_budget(budget_bytes)
    check_options("best_links", options)
    check_true_or_false(overwrite=overwrite)
    check_at_least(1, k=k)
    check_choice("score", score, Score)
    links = _links_of(split, leave_out)
    _check_run(trainer, model, links.types)
    file = None if path is None else check_rows_file("path", path)
    named_by = check_ids_of(file, ids_of)
    if file is not None:
        check_no_file(file, overwrite=overwrite)
    count = len(links.ends.senders)
    ids = torch.arange(count) if senders is None else distinct_ids("senders", senders, count)
    search = LinkSearch(model, links, ids, int(k), score, file, budget_bytes, type_of_model(trainer), named_by)
    predict_once(trainer, model, search.step, options)
    return search.found


def _check_run(trainer: Trainer, model: LightningModule, types: TypeNames) -> None:
    """Refuse a model whose rows of all nodes cannot be computed."""
    check_instance("trainer", trainer, Trainer, "a lightning.pytorch.Trainer")
    check_instance("model", model, LightningModule, "a LightningModule with a method layers()")
    if has_layers(model):
        layers_in(model)  # refuses those that cannot be computed one by one
    elif layers_of_model(model) is None:
        raise TypeError(
            f"model: {type(model).__name__} has no method layers(), nor one of PyG's models in it: rows of all nodes "
            "are computed layer by layer. Let layers() return one function for each layer, and forward() score the "
            "rows of through_layers(self, batch)."
        )
    elif have_names(types):
        raise TypeError(
            f"model: {type(model).__name__} has no method layers(), and a model of PyG's in it takes no types: let "
            "layers() return one function for each layer."
        )


def _links_of(split: LinkSplit | str | Path, leave_out: Sequence[LeftOut]) -> Links:
    """Return between which nodes links are, and which pairs are left out.

    Events are refused, which nodes have no rows of their own for.
    """
    check_list("leave_out", leave_out, '["edges", "self"]')
    for name in leave_out:
        check_choice("leave_out", name, LeftOut)
    check_instance("split", split, LinkSplit | str | Path, "split_edges(graph), or the path of a saved split or shards")
    if isinstance(split, str | Path) and holds_shards(path := check_path("split", split)):
        bounds = extension("index of shards").read(path)
        if bounds.links is None:
            raise ValueError(f"split: {path} holds shards of a graph whose edges are not split: divide a split.")
        if held := [name for name in leave_out if name in ("val", "test")]:
            raise ValueError(
                f"leave_out: of shards no rank has all {held[0]} edges: leave {held[0]!r} out, or give the whole split."
            )
        time, found = bounds.links.time, Links(path, None, bounds.types, bounds.links.edge_type, tuple(leave_out))
    else:
        whole = split if isinstance(split, LinkSplit) else LinkSplit.open(check_path("split", split))
        time, found = whole.time, Links(whole.graph, whole, whole.graph.types, whole.edge_type, tuple(leave_out))
    if time is not None:
        raise ValueError(
            f"split: of a split by time ({time}) a node has rows at the times of its events, and none of its own that "
            "could be ranked: score events by trainer.test(...)."
        )
    return found
