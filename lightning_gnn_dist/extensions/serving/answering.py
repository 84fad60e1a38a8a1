"""Answers requests with the rows of the nodes that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from numpy.typing import NDArray

from lightning_gnn_dist.batches.batch import in_type
from lightning_gnn_dist.checks import check_instance, shown
from lightning_gnn_dist.data.datamodule import PartitionedDataModule, what_is_judged
from lightning_gnn_dist.extensions.serving.extended_graph import ExtendedGraph, ServedSampler
from lightning_gnn_dist.extensions.serving.question import Form, Limits, Question, shards_are_not_served
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.row_file import rows_of
from lightning_gnn_dist.homes.run import type_of_model
from lightning_gnn_dist.layers.layered_loader import for_layers
from lightning_gnn_dist.layers.through_layers import has_layers, layers_in, needs_whole_graph, norm_of_all_rows
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

NODES_AT_ONCE = 64  # that are answered by one call of the model, so that a large request keeps others waiting less
EDGES_AT_ONCE = 1 << 24  # that these may have at most, so that nodes with very many neighbours fit into memory


class Answerer:
    """Answers requests about the graph that a data module predicts.

    Args:
        trainer: Says with which precision the model computes.
        model: The model, with its weights, on the device that computes.
        data: The data module.
        limits: What a request may ask for.
        neighbors: How many neighbours of a node are drawn where the data module says that all are taken: all of a node
            that has fewer, so that its row is exact.
        ids_of: The prepared graph by whose tables' ids requests name nodes. Default: they name them by numbers.

    Attributes:
        form: Reads requests.
        nodes_at_once: For how many nodes the model is called at once, at most.
    """

    def __init__(
        self,
        trainer: Trainer,
        model: LightningModule,
        data: object,
        limits: Limits,
        neighbors: int,
        ids_of: Path | None = None,
    ) -> None:
        check_instance("data", data, PartitionedDataModule, "a PartitionedDataModule, whose nodes are predicted")
        assert isinstance(data, PartitionedDataModule)
        if (norm := norm_of_all_rows(model)) is not None:
            raise ValueError(
                f"{norm} normalises by all rows of a batch, so that an answer would depend on who asks beside: use a "
                "norm of each row, such as torch.nn.LayerNorm."
            )
        self._trainer, self._model, self._data = trainer, model.eval(), data
        graph = what_is_judged(data)
        if isinstance(graph, Path):
            raise shards_are_not_served(graph)
        self._graph = graph
        more_hops = int(needs_whole_graph(layers_in(model) if has_layers(model) else []))
        self._sampler = limited(data._home.running.sampler_of_evaluation(more_hops, model), neighbors)
        check_ids_of_new(self._graph, limits.new_nodes)
        self._most_new, types = limits.new_nodes, self._graph.types
        edges_of_node = int(self._sampler.of_types(types).astype(object).sum(1).prod())
        self.nodes_at_once = max(1, min(NODES_AT_ONCE, EDGES_AT_ONCE // max(1, edges_of_node)))
        self._widen = data._home.running.within(trainer).widen
        self.form = Form(self._graph, types.seed_type(), limits, ids_of)

    @property
    def about(self) -> dict[str, Any]:
        """What is answered: the model, the number of nodes, and how their neighbours are drawn."""
        types = self._graph.types
        num_nodes = len(types.nodes_of(types.seed_type()))
        return {"model": type(self._model).__name__, "nodes": num_nodes, "sampler": str(self._sampler)}

    def warm_up(self) -> None:
        """Answer for a node of the graph, so that what cannot be served is refused now, and all loops are compiled."""
        self.rows([self.form.of_first()])

    def rows(self, asked: Sequence[Question]) -> list[NDArray[Any]]:
        """Return the rows that each request asks for."""
        counts, groups = [len(of.nodes) for of in asked], [asked]
        if sum(counts) > self.nodes_at_once:
            groups = [[of._replace(nodes=some)] for of in asked for some in of.nodes.split(self.nodes_at_once)]
        with torch.inference_mode(), self._trainer.precision_plugin.forward_context():
            found = np.concatenate([self._at_once(group) for group in groups])
        return np.split(found, np.cumsum(counts)[:-1])

    def _at_once(self, asked: Sequence[Question]) -> NDArray[Any]:
        graph = ExtendedGraph(self._graph, self._graph.types.seed_type(), asked, self._most_new)
        batch = for_layers(graph.batch(self._sampler, self._widen), self._data.sampler.num_hops)
        batch = in_type(batch, type_of_model(self._trainer))
        step = self._model.predict_step
        more = (0,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
        return rows_of(step(self._on_device(batch), *more), sum(len(of.nodes) for of in asked))

    def _on_device(self, batch: Any) -> Any:
        """Bring a batch to the model's device, by the hooks of the data module or of the model."""
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            owner = self._data if is_overridden(name, self._data) else self._model
            more = (self._model.device, 0) if name == "transfer_batch_to_device" else (0,)
            batch = getattr(owner, name)(batch, *more)
        return batch


def check_ids_of_new(graph: Graph, most_new: int) -> None:
    """Refuse a graph in which new nodes could not be called by numbers behind those of its nodes."""
    if any("n_id" in arrays for arrays in graph.types.node_arrays.values()):
        raise ValueError(
            "The graph has n_id, ids of a larger graph that it was cut from: serve that one, or take the array out, "
            "and nodes are called by their ids in the graph itself."
        )
    if graph.num_nodes + most_new > torch.iinfo(graph.indices.dtype).max:
        raise ValueError(f"limits.new_nodes ({most_new}) must fit behind the {graph.num_nodes} nodes: take fewer.")


def limited(sampler: Sampler, most: int) -> ServedSampler:
    """Return a sampler that draws at most so many neighbours where it would take all of them."""
    if not isinstance(sampler, NeighborSampler | TemporalSampler):
        raise TypeError(f"serve draws by NeighborSampler or TemporalSampler, got {shown(sampler)}: choose one of them.")
    given = sampler.num_neighbors
    of_kinds = given if isinstance(given, Mapping) else {None: given}
    numbers = {kind: [most if number < 0 else number for number in of] for kind, of in of_kinds.items()}
    return replace(sampler, num_neighbors=numbers if isinstance(given, Mapping) else numbers[None])
