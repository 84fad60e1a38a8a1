"""Predictions of a model for every node, computed one layer at a time.

    h_0 = x,   h_l[v] = layer_l(h_(l-1)[v], {h_(l-1)[u] : u -> v}) for all v, before any h_(l+1)

So a layer is computed once for each node. Batches with all neighbours would compute the inner layers of a node again
for every batch that reaches it, and hold all nodes within as many hops as there are layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.checks import (
    MAX_INTEGER,
    check_callable,
    check_instance,
    check_npy,
    check_true_or_false,
    is_integer,
    is_limit,
    shown,
)
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.joint import HoldsShards
from lightning_gnn_dist.layerwise.layers import Layer, LayerWork, OnRows, has_layers, with_arrays, with_x
from lightning_gnn_dist.layerwise.ready_made import whole_graph_arrays
from lightning_gnn_dist.layerwise.sharded_layers import ShardedWork
from lightning_gnn_dist.layerwise.shared_rows import SharedRows
from lightning_gnn_dist.prepare.shard import Bounds
from lightning_gnn_dist.wire import collectives

BUDGET_BYTES = 1 << 30
LEAST_BYTES = 16 << 20  # with less, the sampler's table of nodes would leave no room for a batch


def predict_by_layer(
    trainer: Trainer,
    model: LightningModule,
    graph: Graph | HoldsShards,
    path: str | Path | None,
    *,
    on_rows: OnRows | None = None,
    budget_bytes: int = BUDGET_BYTES,
    overwrite: bool = False,
    **options: Any,
) -> None:
    """Write the model's rows of all nodes to one ``.npy``, row ``v`` for node ``v``; all ranks share the work.

        class SAGE(pl.LightningModule):
            def layers(self):
                return [lambda batch: self.conv1(batch.x, batch.edge_index).relu(), self.last]

    With a sharded graph, every rank computes a layer for nodes of its own shard. Before the next layer it receives the
    rows of the nodes of other ranks that send to these. The rows lie in a temporary folder beside the shards, which
    takes as much room as the arrays of all these nodes. The file is in the order of ``n_id``, that of the graph before
    it was divided.

    Args:
        trainer: Starts the ranks, places the model and sets the precision.
        model: A module with a method ``layers``, see :class:`HasLayers`.
        graph: The graph, on every rank; the file, and those of inner layers beside it, then need storage that all ranks
            share. Or the data module of a sharded graph: then only the file itself needs such storage.
        path: The file. It appears when it is complete. With a sharded graph and ``on_rows``, None writes no file.
        on_rows: Called on each rank with the batches of the last layer and the rows of their ``batch_size`` seeds. Over
            all ranks, every node is a seed once: ``metric.update(rows[mask], batch.y[:batch.batch_size][mask])`` with
            ``mask = batch.test_mask[:batch.batch_size]`` is an exact evaluation.
        budget_bytes: Bytes that a batch may take on each rank, beside what the process takes anyway. What a layer
            computes for every edge, as attention does, comes on top; so do pages of mapped files where there is no
            ``/proc``. A node with more neighbours than the budget allows is a batch of its own.
        overwrite: Replace an existing file.
        options: Passed to ``trainer.predict``: ``ckpt_path``, ``weights_only``.
    """
    path = None if path is None else check_npy("path", path)
    check_instance("graph", graph, Graph | HoldsShards, "a Graph or a ShardedDataModule")
    _check_untyped(graph)
    check_true_or_false(overwrite=overwrite)
    _check_options(options)
    if on_rows is not None:
        check_callable("on_rows", on_rows, "a function of a batch and its rows, such as lambda batch, rows: ...", 0, 0)
    _check(trainer, model, budget_bytes)
    _check_path(path, on_rows, is_sharded=isinstance(graph, HoldsShards), overwrite=overwrite)
    work: _Work | ShardedWork
    if isinstance(graph, HoldsShards):
        work = ShardedWork(model, path, budget_bytes, on_rows, folder=graph.shards_path)
    else:
        work = _Work(model, path, budget_bytes, on_rows, graph=graph)
    # Run as a step of Lightning's loop, which starts ranks, loads the checkpoint and sets the precision.
    model.predict_step = work.step  # type: ignore[method-assign]
    try:
        trainer.predict(model, dataloaders=_Once(), return_predictions=False, **options)
    finally:
        del model.predict_step


def _check_untyped(graph: Graph | HoldsShards) -> None:
    if isinstance(graph, Graph):
        graph.check_untyped()
    elif have_names(Bounds.read(graph.shards_path).types):
        raise ValueError(
            "predict_by_layer takes shards of a graph without types, and this one has some: use trainer.predict(model, "
            'data) with PredictionWriter("rows.npy"), which samples all neighbours of each batch.'
        )


class _Once:
    """A loader of one batch, so that Lightning runs one step, which does all the work."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


@dataclass(kw_only=True)
class _Work(LayerWork):
    """The work of a rank that has the whole graph. All ranks meet after each layer."""

    graph: Graph

    def step(self, batch: Tensor) -> Tensor:
        """Take the place of the module's ``predict_step``."""
        assert self.path is not None
        layers = self.layers()
        num_nodes, num_ranks = self.graph.num_nodes, collectives.world_size()
        if num_nodes < num_ranks:
            raise ValueError(f"{num_nodes} nodes are too few for {num_ranks} ranks to share.")
        rank_zero_info(f"{len(layers)} layers, one after the other, for {num_nodes:,} nodes.")
        graph = self.inputs = with_arrays(self.graph, whole_graph_arrays(layers, self.graph))
        files = [self.shared_rows(self.path, num_nodes) for _ in layers]
        try:
            for layer, file in zip(layers[:-1], files, strict=False):
                self._write_layer(layer, graph, file, None)
                file.complete()
                graph = with_x(self.inputs, file.draft)
            self._write_layer(layers[-1], graph, files[-1], self.on_rows)
            files[-1].publish()
        finally:
            for file in files:
                file.discard()
        return batch

    def _write_layer(self, layer: Layer, graph: Graph, file: SharedRows, on_rows: OnRows | None) -> None:
        """Compute a layer for this rank's share of the nodes, and write their rows."""
        rank, num_ranks = collectives.rank(), collectives.world_size()
        start, end = graph.num_nodes * rank // num_ranks, graph.num_nodes * (rank + 1) // num_ranks
        for nodes, rows in self.compute(layer, graph, range(start, end), on_rows):
            file.write(np.arange(nodes.start, nodes.stop), rows)


def _check(trainer: Trainer, model: LightningModule, budget_bytes: int) -> None:
    check_instance("trainer", trainer, Trainer, "a lightning.pytorch.Trainer")
    check_instance("model", model, LightningModule, "a LightningModule with a method layers()")
    if not has_layers(model):
        raise TypeError(
            f"model: {type(model).__name__} has no method layers() that returns one function for each layer."
        )
    if not is_integer(budget_bytes) or not LEAST_BYTES <= budget_bytes <= MAX_INTEGER:
        raise ValueError(f"budget_bytes must be at least 16 megabytes, 16 << 20, got {shown(budget_bytes)}.")
    if is_limit(trainer.limit_predict_batches):
        raise ValueError(
            f"limit_predict_batches={trainer.limit_predict_batches!r} would leave rows without a prediction: all nodes "
            "are written. Leave the limit out."
        )


def _check_options(options: dict[str, Any]) -> None:
    """Refuse options that ``trainer.predict`` does not know, or that are decided here."""
    known = inspect.signature(Trainer.predict).parameters.keys() & {"ckpt_path", "weights_only"}
    if unknown := sorted(options.keys() - known):
        raise TypeError(
            f"predict_by_layer() knows no argument {unknown[0]!r}: beside its own it passes on {sorted(known)}."
        )


def _check_path(path: Path | None, on_rows: OnRows | None, *, is_sharded: bool, overwrite: bool) -> None:
    if path is None and not (is_sharded and on_rows is not None):
        raise ValueError(
            "path=None keeps nothing: name a file. Only with on_rows, and of a sharded graph, can it be left out: "
            "otherwise ranks share the rows of inner layers beside the file."
        )
    if path is not None and path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already. Choose another path, or overwrite=True.")
