"""Predictions of a model for every node, computed one layer at a time.

    h_0 = x,   h_l[v] = layer_l(h_(l-1)[v], {h_(l-1)[u] : u -> v}) for all v, before any h_(l+1)

It is the pass over the layers that an evaluation makes, for all nodes: a layer is computed once for each, and the last
layer's rows go to the file batch by batch, so that nobody holds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.callbacks.shared_rows import SharedRows
from lightning_gnn_dist.checks import (
    MAX_INTEGER,
    check_callable,
    check_instance,
    check_path,
    check_true_or_false,
    is_integer,
    is_limit,
    shown,
)
from lightning_gnn_dist.extensions.passes.layer_pass import FarPass, FileNodes, OnRows, folder_beside
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.parquet_rows import TABLES, check_ids_of, check_no_file, check_rows_file
from lightning_gnn_dist.graph.storage.row_file import rows_of
from lightning_gnn_dist.graph.storage.store import holds_shards
from lightning_gnn_dist.graph.typed.types import TypeNames
from lightning_gnn_dist.graph.user_ids import NodeColumns, columns_for
from lightning_gnn_dist.homes.run import BUDGET_BYTES, type_of_model
from lightning_gnn_dist.homes.settings import LEAST_BYTES
from lightning_gnn_dist.layers.layer_pass import Ids, Work, agreed_forms, by_type, ids_of
from lightning_gnn_dist.layers.through_layers import Layer, has_layers, layers_in, norm_of_all_rows
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import CPU, Channel, open_channel


def predict_by_layer(
    trainer: Trainer,
    model: LightningModule,
    graph: Graph | str | Path,
    path: str | Path | None,
    *,
    on_rows: OnRows | None = None,
    budget_bytes: int | None = None,
    overwrite: bool = False,
    seed_type: str | None = None,
    ids_of: str | Path | None = None,
    **options: Any,
) -> None:
    """Write the model's rows of all nodes to one file, row ``v`` for node ``v``; all ranks share the work.

        class SAGE(pl.LightningModule):
            def layers(self):
                return [lambda batch: self.conv1(batch.x, batch.edge_index).relu(), self.last]

    Every rank computes a layer for its own nodes, of a sharded graph for nodes of its shard. Before the next layer it
    receives the rows of the nodes of other ranks that send to these. Rows of inner layers that take more than a share
    of the budget lie in a file without a name: beside ``path``, or beside the shards. The file of a sharded graph is in
    the order of ``n_id``, that of the graph before it was divided.

    Args:
        trainer: Starts the ranks, places the model and sets the precision.
        model: A module with a method ``layers``, see :class:`HasLayers`.
        graph: The graph, on every rank, or the path of a saved one or of shards.
        path: The file, ``.npy``, ``.parquet`` or ``.csv``, see :class:`PredictionWriter`. It appears when it is
            complete. Ranks on several hosts need storage that they share. With ``on_rows``, None writes no file.
        on_rows: Called on each rank with the batches of the last layer and the rows of their ``batch_size`` seeds. Over
            all ranks, every node is a seed once: ``metric.update(rows[mask], batch.y[:batch.batch_size][mask])`` with
            ``mask = batch.test_mask[:batch.batch_size]`` is an exact evaluation.
        budget_bytes: Bytes that prediction may take on each rank, beside what the process takes anyway: so many of RAM,
            and so many of a GPU's own memory, up to half of what is free there. Pages of mapped files come on top where
            there is no ``/proc``. A node with more neighbours than the budget allows is a batch of its own. Default: 1
            GiB of RAM, and half of what is free on the GPU.
        overwrite: Replace an existing file.
        seed_type: In a graph with types the node type whose rows are written, row ``v`` for its node ``v``. Default:
            the one with a ``train_mask``.
        ids_of: For a table, the prepared graph whose ids nodes have, of shards the one that was divided. Default:
            this graph.
        options: Passed to ``trainer.predict``: ``ckpt_path``, ``weights_only``.
    """
    if on_rows is not None:
        check_callable("on_rows", on_rows, "a function of a batch and its rows, such as lambda batch, rows: ...", 0, 0)
    elif path is None:
        raise ValueError("path=None keeps nothing: name a file. Only with on_rows can it be left out.")
    _check(trainer, model, options, budget_bytes)
    file = _checked_file(path, overwrite)
    named_by = check_ids_of(file, ids_of)
    where, kind = _graph_or_shards(graph, seed_type)
    work = Work(CPU, type_of_model(trainer), True, budget_bytes or BUDGET_BYTES, budget_bytes)
    # A step of Lightning's loop, which starts ranks, loads the checkpoint and sets the precision.
    model.predict_step = Prediction(model, where, file, work, on_rows, kind, named_by).step  # type: ignore[method-assign]
    try:
        trainer.predict(model, dataloaders=_Once(), return_predictions=False, **options)
    finally:
        del model.predict_step


def _checked_file(path: str | Path | None, overwrite: bool) -> Path | None:
    check_true_or_false(overwrite=overwrite)
    file = None if path is None else check_rows_file("path", path)
    if file is not None:
        check_no_file(file, overwrite=overwrite)
    return file


def _graph_or_shards(given: Graph | str | Path, seed_type: str | None) -> tuple[Graph | Path, str]:
    """Return the graph, or the folder of its shards, and the type that is predicted; refuse one that is not there."""
    if isinstance(given, str | Path) and holds_shards(path := check_path("graph", given)):
        return path, _known_type(extension("index of shards").Bounds.read(path).types, seed_type)
    check_instance("graph", given, Graph | str | Path, "a Graph, or the path of a saved one or of shards")
    graph = given if isinstance(given, Graph) else Graph.open(given)
    return graph, _known_type(graph.types, seed_type)


def _known_type(types: TypeNames, seed_type: str | None) -> str:
    if seed_type is None:
        return types.seed_type()  # refuses, if it is unclear
    if not types.have_names:
        raise ValueError(f"seed_type ({shown(seed_type)}) is for a graph with types, and this one has none.")
    if seed_type not in types.node_types:
        raise ValueError(f"seed_type must be one of {shown(list(types.node_types))}, got {shown(seed_type)}.")
    return seed_type


class _Once:
    """A loader of one batch, so that Lightning runs one step, which does all the work."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


@dataclass
class Prediction:
    """The work of one rank: a pass over the layers, for its own nodes. All ranks do it together.

    Attributes:
        model: A module with a method ``layers``.
        where: The graph, or the folder of its shards.
        path: The file for the rows of the last layer, which all ranks share, or None to write none.
        work: How rows are computed, but for the device.
        on_rows: Called with each batch of the last layer and the rows of its seeds.
        seed_type: The node type that is predicted.
        ids_of: The prepared graph whose ids nodes have in a table. Default: the graph.
    """

    model: LightningModule
    where: Graph | Path
    path: Path | None
    work: Work
    on_rows: OnRows | None
    seed_type: str
    ids_of: Path | None = None

    def step(self, batch: Tensor) -> Tensor:
        """Take the place of the module's ``predict_step``."""
        layers, channel = layers_in(self.model), open_channel(collectives.world_size(), self.model.device)
        try:
            over_all, own = self._pass(layers, channel)
            types = over_all.nodes.types
            kind = types.node_types.index(self.seed_type)
            num_nodes = types.offsets[kind + 1] - types.offsets[kind]
            if self.path is not None and isinstance(self.where, Path):
                of_kind = ids_of(by_type(own, types.offsets)[kind])
                _check_places(over_all.nodes.ids_in_type(kind, of_kind), num_nodes)
            rank_zero_info(f"{len(layers)} layers, one after the other, for {num_nodes:,} nodes.")
            over_all.plan_of_own(own, len(layers), kind)
            self._write(over_all, layers, kind, num_nodes)
        finally:
            channel.close()
        return batch

    def _pass(self, layers: list[Layer], channel: Channel) -> tuple[FarPass, Ids]:
        """Divide all nodes among the ranks; return the pass over them, and this rank's nodes. Collective."""
        where, work, norm = self.where, self.work._replace(device=self.model.device), norm_of_all_rows(self.model)
        if norm is not None and channel.size > 1:
            raise ValueError(
                f"{norm} takes the rows of all nodes at once: predict with Trainer(devices=1), or choose a norm of "
                "single rows such as BatchNorm."
            )
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(where, Path):
            shard = extension("nodes of shards")(where, layers, channel, work.budget_bytes, self.seed_type)
            return FarPass(shard, channel, work, norm, where.resolve().parent), shard.own(channel.rank)
        if where.num_nodes < channel.size:
            raise ValueError(f"{where.num_nodes} nodes are too few for {channel.size} ranks to share.")
        whole = FileNodes(where, None, layers, channel.size, work.budget_bytes, seed_type=self.seed_type)
        folder = folder_beside(where) if self.path is None else self.path.parent
        return FarPass(whole, channel, work, norm, folder), whole.own(channel.rank)

    def _write(self, over_all: FarPass, layers: list[Layer], kind: int, num_nodes: int) -> None:
        """Compute the layers, and write the rows of the last one. Collective."""
        nodes, file = over_all.nodes, None
        if self.path is not None:
            file = self._file(self.path, nodes.types.node_types[kind], num_nodes)
        try:
            found = over_all.last_rows(layers, self.on_rows, kind)
            first = next(found, None)
            (like,) = agreed_forms(over_all.channel, [None if first is None else first[1]], over_all.says)
            if file is not None and like is not None:
                file.open(rows_of(like, 0))  # also on a rank that owns no node of the type
            for some, rows in chain([] if first is None else [first], found):
                if file is not None:
                    file.write(nodes.ids_in_type(kind, some).numpy(), rows_of(rows, len(some)))
            if file is not None:
                file.publish()
        finally:
            if file is not None:
                file.discard()

    def _file(self, path: Path, node_type: str, num_nodes: int) -> SharedRows:
        graph = self.where.path if isinstance(self.where, Graph) else None
        is_table = path.suffix in TABLES
        columns = columns_for(self.ids_of, graph, node_type, num_nodes) if is_table else NodeColumns()
        return SharedRows(path, num_nodes, self.model.device, "a layer", columns)


def _check_places(n_id: Tensor, num_nodes: int) -> None:
    if n_id.numel() and (n_id.min() < 0 or n_id.max() >= num_nodes):
        raise ValueError(
            f"n_id holds {n_id.min()} to {n_id.max()}, but the graph has {num_nodes} nodes: row v of the file is that "
            "of node v. Leave path out, and take the rows by on_rows."
        )


def _check(trainer: object, model: object, options: dict[str, Any], budget_bytes: int | None) -> None:
    """Refuse options that ``trainer.predict`` does not know, or that are decided here, and what gives no rows."""
    known = inspect.signature(Trainer.predict).parameters.keys() & {"ckpt_path", "weights_only"}
    if unknown := sorted(options.keys() - known):
        raise TypeError(
            f"predict_by_layer() knows no argument {unknown[0]!r}: beside its own it passes on {sorted(known)}."
        )
    check_instance("trainer", trainer, Trainer, "a lightning.pytorch.Trainer")
    check_instance("model", model, LightningModule, "a LightningModule with a method layers()")
    assert isinstance(trainer, Trainer) and isinstance(model, LightningModule)
    if not has_layers(model):
        raise TypeError(
            f"model: {type(model).__name__} has no method layers() that returns one function for each layer."
        )
    if is_limit(trainer.limit_predict_batches):
        raise ValueError(
            f"limit_predict_batches={trainer.limit_predict_batches!r} would leave rows without a prediction: all nodes "
            "are written. Leave the limit out."
        )
    if budget_bytes is not None and (not is_integer(budget_bytes) or not LEAST_BYTES <= budget_bytes <= MAX_INTEGER):
        raise ValueError(f"budget_bytes must be at least 16 megabytes, 16 << 20, got {shown(budget_bytes)}.")
