"""Batches of an evaluation whose rows are ready: every layer is computed for all seeds before the first batch."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_gnn_dist.batches.batch import ENDS, Promising, SampledData
from lightning_gnn_dist.batches.batches import Batches, Deal, Learning, Made, asked_of
from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.batches.seed_batch import Neighbourhood, SeedsOnly
from lightning_gnn_dist.engine.apart import in_types
from lightning_gnn_dist.layers.choice import Judged
from lightning_gnn_dist.layers.layer_pass import GraphNodes, LayerPass, LayerRows, by_type
from lightning_gnn_dist.layers.through_layers import ModelLayers, ModelState, is_in_training, layers_of_model
from lightning_gnn_dist.wire.channel import Channel, open_channel

log = logging.getLogger(__name__)


class Answers:
    """The rows that a pass over the layers has computed, as long as a batch may ask for them.

    Args:
        tables: The rows.
        owner: The model.
        when_asked: Called when somebody takes rows.
    """

    def __init__(self, tables: LayerRows, owner: nn.Module, when_asked: Callable[[], None]) -> None:
        self._tables, self._owner, self._when_asked = tables, owner, when_asked
        self._state = ModelState(owner)

    def rows_of(self, module: object, nodes: Sequence[Tensor]) -> Callable[[], RowsOfTypes] | None:
        """Return a function for the last layer's rows of some seeds of each type.

        None where another module asks, or this one with other weights, or somebody who wants gradients.
        """
        if module is not self._owner or torch.is_grad_enabled() or not self._state.is_of(self._owner):
            return None

        def rows() -> RowsOfTypes:
            self._when_asked()
            return self._tables.take(nodes)

        return rows


class ReadyRows:
    """Computes the rows of all seeds of a rank, once for each evaluation. All ranks do so together.

    Args:
        trainer: Holds the model, and says with which precision it computes.
        pass_of: Makes a pass of some layers on some ranks. Its last argument returns this rank's seeds, in increasing
            order. Collective.
        num_ranks: How many ranks share the work.
    """

    def __init__(
        self,
        trainer: Trainer,
        pass_of: Callable[[ModelLayers, Channel, Callable[[], Tensor]], LayerPass],
        num_ranks: int,
    ) -> None:
        self._trainer, self._pass_of, self._num_ranks = trainer, pass_of, num_ranks
        self._channel: Channel | None = None
        self._pass: LayerPass | None = None
        self._was_asked, self._was_tried, self._is_off = True, False, False
        self._end: Callable[[], object] = lambda: None

    @property
    def nodes(self) -> GraphNodes:
        assert self._pass is not None
        return self._pass.nodes

    @property
    def num_asked(self) -> float:
        """The number of batches that the trainer asks for in its evaluation; a sanity check asks for few."""
        trainer = self._trainer
        if trainer.predicting:
            return max(trainer.num_predict_batches)
        if trainer.testing:
            return max(trainer.num_test_batches)
        return max(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    def computed(self, seeds: Callable[[], Tensor]) -> Answers | None:
        """Compute the rows of some seeds, and let the model answer with them; or do neither, and return None.

        It answers until nobody holds what is returned. Collective.
        """
        self._end()
        if self._is_off or not (self._trainer.evaluating or self._trainer.predicting):  # else ranks may not all be here
            return None
        model = layers_of_model(self._trainer.lightning_module)
        if not self._agree(None if model is None or is_in_training(model.owner) else ModelState(model.owner).digest):
            return None
        assert model is not None
        work = self._planned(model, seeds)
        if not self._can_compute(work, model):
            return None
        with self._trainer.precision_plugin.forward_context():
            tables = work.rows(model.layers)
        self._was_asked = False
        answers = Answers(tables, model.owner, self._note_that_asked)
        self._end = weakref.finalize(answers, model.let_answer())
        return answers

    def close(self) -> None:
        """End the connections. Not collective."""
        self._end()
        if self._channel is not None:
            self._channel.close()
        self._channel = self._pass = None

    def _note_that_asked(self) -> None:
        self._was_asked = True

    def _agree(self, digest: int | None) -> bool:
        """Return whether ranks have the same model, and any has asked for rows in the evaluation before. Collective.

        Replicas may differ: in statistics of batch norms that are averaged by rank, or in weights that no strategy
        made equal. Then each rank evaluates its own, as on full neighbourhoods.
        """
        if self._channel is None:
            self._channel = open_channel(self._num_ranks, self._trainer.strategy.root_device)
        votes = torch.tensor([[int(self._was_asked), -1 if digest is None else digest]])
        asked, digests = torch.cat(self._channel.exchange([votes] * self._channel.size)).unbind(1)
        self._is_off = not asked.any()
        if self._is_off:
            log.info(
                "The layers of %s were computed for all nodes, and nobody asked for them: from now on it is evaluated "
                "on full neighbourhoods. Let forward() return through_layers(self, batch).",
                type(self._trainer.lightning_module).__name__,
            )
        return not self._is_off and digest is not None and bool(digests.eq(digest).all())

    def _planned(self, model: ModelLayers, seeds: Callable[[], Tensor]) -> LayerPass:
        """Plan the pass over the layers, once. Collective."""
        assert self._channel is not None
        if self._pass is None:
            self._pass = self._pass_of(model, self._channel, seeds)
            self._was_tried = not model.is_found  # a module knows what its own layers take
        return self._pass

    def _can_compute(self, work: LayerPass, model: ModelLayers) -> bool:
        """Return whether a model of PyG's takes the rows of the graph: a module may give it others. Collective."""
        assert self._channel is not None
        if self._was_tried:
            return True
        takes, self._was_tried = torch.ones(1, dtype=torch.int64), True
        try:
            with self._trainer.precision_plugin.forward_context():
                work.try_one(model.layers[0])
        except Exception as error:  # of any kind: what the module does with its model may be right
            log.info("Layers cannot be computed one by one: %s", error)
            takes.zero_()
        self._is_off = not torch.cat(self._channel.exchange([takes] * self._channel.size)).all()
        return not self._is_off


def for_layers(batch: Any, num_layers: int) -> SampledData:
    """Return a batch with blocks for so many layers: the edges of further hops are in its ``edge_index`` alone."""
    for store in batch.stores:
        if isinstance(store, Promising):
            store._num_layers = num_layers
    made: SampledData = batch
    return made


class EvaluationLoader(Batches):
    """The batches of an evaluation, which may know the rows that layers compute for their seeds.

    Args:
        num_layers: How many layers batches have blocks for.
        look: Called before a pass over batches of full neighbourhoods.
        rows: Computes rows, before the first batch of a pass; None where batches do it at less cost.
        judged: What is evaluated.
        learning: Makes batches, and deals them the seeds.
        options: What :class:`Batches` take.
    """

    def __init__(
        self,
        num_layers: int,
        look: Callable[[], None],
        rows: ReadyRows | None,
        judged: Judged,
        learning: Learning,
        **options: Any,
    ) -> None:
        super().__init__(lambda _: learning, learning.deal.num_batches, **options)
        self._num_layers, self._look, self._rows, self._judged = num_layers, look, rows, judged
        self.learning(0)

    def __iter__(self) -> Made:
        rows = self._rows
        seeds = self.learning(0).deal.seeds
        answers = None if rows is None else rows.computed(lambda: self._judged.nodes_of(seeds))
        if rows is None or answers is None:
            self._look()
            yield from super().__iter__()
            return
        first, held = self.position, [answers]
        self.position += len(self)
        del answers  # a trainer leaves this frame at the last batch that it asks for: that batch alone holds the rows
        last = first + min(len(self), rows.num_asked) - 1
        for number in range(first, first + len(self)):
            yield self._batch(rows.nodes, number, held.pop() if number == last else next(iter(held), None))

    def close(self) -> None:
        super().close()
        if self._rows is not None:
            self._rows.close()

    def _finished(self, batch: SampledData, deal: Deal, number: int) -> SampledData:
        return for_layers(super()._finished(batch, deal, number), self._num_layers)

    def _batch(self, of_nodes: GraphNodes, number: int, answers: Answers | None) -> Any:
        learning = self.learning(0)
        asked = asked_of(learning, [number])
        (seeds,), inputs = asked[0], None if asked[2] is None else asked[2][0]
        targets, types = self._judged.targets(seeds), of_nodes.types
        of_types = by_type(targets.nodes, types.offsets)
        others = dict(targets.others)
        if ENDS in others:
            others[ENDS] = in_types(others[ENDS], list(map(len, of_types)))
        if inputs is not None:
            others["input_id"] = inputs
        names = of_nodes.names_in_batches
        kinds = (None,) if None in names else types.node_types
        seed_type = targets.edge_type or (None if None in names else types.seed_type())

        def made() -> SampledData:
            (batch,) = learning.source.make(*asked)
            return self._finished(batch, learning.deal, number)

        def seed_rows(kind: object, name: str) -> Tensor | None:
            number = kinds.index(kind)
            rows = of_nodes.inputs(number, name, of_types[number])
            return rows if rows is None or not rows.is_floating_point() else rows.to(self._dtype or rows.dtype)

        def rows_of(module: object) -> Callable[[], RowsOfTypes] | None:
            return None if answers is None else answers.rows_of(module, of_types)

        num_seeds = {kind: len(ids) for kind, ids in zip(kinds, of_types, strict=True)}
        neighbourhood = Neighbourhood(num_seeds, made, seed_rows, rows_of)
        return SeedsOnly.around(neighbourhood, names, seed_type, others)
