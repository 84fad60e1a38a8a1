"""Answers requests with the rows of the nodes that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_gnn_dist.checks import check_instance
from lightning_gnn_dist.data.datamodule import PartitionedDataModule, what_is_predicted
from lightning_gnn_dist.extensions.serving.limits import Limits
from lightning_gnn_dist.extensions.serving.question import Form, Question
from lightning_gnn_dist.extensions.serving.rows import NodeRows, check_norms, limited
from lightning_gnn_dist.layers.through_layers import has_layers, layers_in, needs_whole_graph


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
        rows: Returns the rows that each request asks for.
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
        check_norms(model)
        self._model, self._data = model.eval(), data
        layers = layers_in(model) if has_layers(model) else []
        graph, sampler = what_is_predicted(data, model, int(needs_whole_graph(layers)))
        self._sampler, seed_type = limited(sampler, neighbors), graph.types.seed_type()
        of_graph = graph, seed_type, self._sampler, data.sampler.num_hops, data.loading, limits
        self.rows = NodeRows(trainer, self._step, *of_graph)
        self.nodes_at_once = self.rows.nodes_at_once
        self.form = Form(graph, seed_type, limits, ids_of=ids_of)
        self._num_nodes = len(graph.types.nodes_of(seed_type))

    @property
    def about(self) -> dict[str, Any]:
        """What is answered: the model, the number of nodes, and how their neighbours are drawn."""
        return {"model": type(self._model).__name__, "nodes": self._num_nodes, "sampler": str(self._sampler)}

    def warm_up(self) -> None:
        """Answer for a node of the graph, so that what cannot be served is refused now, and all loops are compiled."""
        self.rows([self.form.of_first()])

    def answers(self, asked: Sequence[Question]) -> list[dict[str, Any]]:
        """Return the answer to each request."""
        return [{"rows": rows.tolist()} for rows in self.rows(asked)]

    def _step(self, batch: Any) -> Any:
        step = self._model.predict_step
        more = (0,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
        return step(self._on_device(batch), *more)

    def _on_device(self, batch: Any) -> Any:
        """Bring a batch to the model's device, by the hooks of the data module or of the model."""
        device = self._model.device
        for name, more in (
            ("on_before_batch_transfer", (0,)),
            ("transfer_batch_to_device", (device, 0)),
            ("on_after_batch_transfer", (0,)),
        ):
            owner = self._data if is_overridden(name, self._data) else self._model
            batch = getattr(owner, name)(batch, *more)
        return batch
