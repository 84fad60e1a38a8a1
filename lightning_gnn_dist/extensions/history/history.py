r"""The boundary of rows that layers make of nodes outside a part, as their owners computed them at the last meeting.

.. math::
    h^{(l)}_v = f_l\bigl(h^{(l-1)}_v, \{h^{(l-1)}_u : u \to v\}\bigr) \text{ for } v \text{ inside},
    \qquad h^{(l)}_v = \bar h^{(l)}_v \text{ for } v \text{ outside},\; 0 < l < L

The rows :math:`\bar h` are those of the whole graph and the averaged model; in the local steps they are constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_gnn_dist.batches.one_hop import RowsOfTypes, seen_by_layers
from lightning_gnn_dist.batches.source import Finish
from lightning_gnn_dist.boundary.boundary import Boundary, EdgesInto, Halo, Outside
from lightning_gnn_dist.data.datamodule import GraphDataModule
from lightning_gnn_dist.extensions.passes.layer_pass import FarPass, folder_beside
from lightning_gnn_dist.extensions.passes.part_batch import PartNodes, RunsLayers, against_running_layers, part_batch_of
from lightning_gnn_dist.graph.graph import Graph, with_arrays
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.rows import edge_positions
from lightning_gnn_dist.homes.access import Owners
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.joint import TrainsReplicasApart
from lightning_gnn_dist.layers.layer_pass import LayerPass, LayerRows
from lightning_gnn_dist.layers.through_layers import Layer, layers_in, layers_on_blocks
from lightning_gnn_dist.rounds.lightning_internals import datamodule_of
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.sampling.base import SeesByTime
from lightning_gnn_dist.wire.channel import Channel, open_channel

_LOOKED_AT = 100_000  # rounds whose ends are compared with changes of parts


class KeptRows(MeetingHook):
    """Lets ranks compute the rows for each other, with the model that all have alike, before anything reads them."""

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        self._data: GraphDataModule = datamodule_of(fit.lightning_module.trainer)
        self._is_checked = False

    def begin_round(self) -> None:
        loader, start = self._data._train_batches, self.fit.round.batches_done
        assert loader is not None
        if not self._is_checked and (every := loader.end_of_phase(0)) is not None:
            self._check_parts(every)
        self._is_checked = True
        if self._data._home.is_cut:
            loader.move_to(start)
            assert self._data._home.outside is not None
            self._data._home.outside.refresh(loader.phase_of(start))

    def _check_parts(self, every: int) -> None:
        """Refuse parts that change within a round: after so many batches."""
        trainer: Any = self.fit.lightning_module.trainer
        last, start = trainer.max_epochs, self.fit.round.batches_done
        for idx in range(self.fit.round.round_idx, _LOOKED_AT if last is None or last < 0 else min(last, _LOOKED_AT)):
            stop = start + trainer.strategy.batches_of_round(idx)
            if stop == math.inf:
                _refuse(f"with {trainer.strategy.clock} nobody knows before when that is. Use EverySteps or EveryPass")
            if start // every != (stop - 1) // every:
                _refuse(
                    f"round {idx} is of batches {start} to {stop - 1}, and parts change every {every} batches. Let "
                    "rounds have a length that divides this"
                )
            start = stop


def _refuse(why: str) -> NoReturn:
    raise ValueError(
        "boundary=History() has ranks compute rows for their parts at meetings, so parts may change only there, and "
        f"{why}, or keep parts, with Holding(Fixed()), or use boundary=Halo()."
    )


class MeetingRows(Outside):
    """Knows the rows of nodes outside the running part; those of the part before are forgotten.

    Args:
        home: Where the graph lives.
    """

    home: LocalGraph

    def __init__(self, home: LocalGraph) -> None:
        super().__init__(home)
        self._rows: tuple[Graph, HistoricRows] | None = None
        self._channel: MeetingChannel | None = None

    def of_batches(self, part: Graph, *, are_whole: bool) -> tuple[Graph, Finish]:
        rows = self._rows_of(part)

        def with_places() -> Graph:
            of_whole = self._arrays_of_whole_graph(part) if are_whole else {}
            return with_arrays(self.home.shown(part), of_whole | {PLACE: rows.places})

        return remembered(part, "with places of rows", with_places), partial(part_batch_of, run=rows)

    def refresh(self, super_epoch: int) -> None:
        run, part = self.home.running, self.home.parts.at(super_epoch)
        assert run.trainer is not None
        rows = self._rows_of(part)
        if not rows.is_planned:
            if self._channel is None:
                self._channel = MeetingChannel(open_channel(run.num_ranks, run.device))
            plan, n_id = self.home.plan, part.node_arrays["n_id"]
            owners = Owners(n_id, plan.owner(super_epoch)[plan.partition.assignment[n_id].to(torch.int64)])
            whole, offsets = with_arrays(part, self._arrays_of_whole_graph(part)), self.home.types.offsets
            nodes = PartNodes(whole, owners, run.num_ranks, widen=run.widen, offsets=offsets)
            rows.plan(FarPass(nodes, self._channel, run.work, folder=folder_beside(self.home.whole)))
        with run.trainer.precision_plugin.forward_context():
            rows.refresh(run.trainer.lightning_module)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _rows_of(self, part: Graph) -> HistoricRows:
        if self._rows is None or self._rows[0] is not part:
            num_hops = self.home.running.settings.training_sampler.num_hops
            is_inside = self.home.parts.is_resident
            self._rows = part, HistoricRows(part, is_inside, num_hops, self.home.types.offsets)
        return self._rows[1]

    def _arrays_of_whole_graph(self, part: Graph) -> dict[str, Tensor]:
        assert self.home.running.module is not None
        return self.home.whole_arrays(layers_in(self.home.running.module), part.node_arrays["n_id"])


PLACE = "history_row"  # the node array of a part: where a node's rows stand in all tables, or -1


class HistoricRows:
    """The rows that a rank knows of nodes outside its part. It runs the layers on the batches of the part.

    Args:
        part: What the rank holds. ``n_id`` has the ids in the whole graph.
        is_inside: Which of its nodes have all their in-edges here.
        num_layers: Layers of the model.
        offsets: The first id of each node type in the whole graph, and at the end the number of its nodes.

    Attributes:
        places: Where each node's rows stand in all tables of its type, or -1: int64, shape ``(part.num_nodes,)``.
    """

    def __init__(self, part: Graph, is_inside: Tensor, num_layers: int, offsets: Sequence[int]) -> None:
        self.num_layers = num_layers
        last = _last_readers(part, is_inside, num_layers)
        first = last.argsort(descending=True, stable=True)  # nodes that the last layers read stand first
        known, n_id = first[: int((last > 1).sum())], part.node_arrays["n_id"]
        kinds = torch.searchsorted(torch.tensor(offsets), n_id[known], right=True) - 1
        self.places, self._nodes = torch.full((part.num_nodes,), -1), list[Tensor]()
        self._counts = list[list[int]]()  # of each layer, how many nodes of each type have a row behind it
        for kind in range(len(offsets) - 1):
            of_kind = known[kinds == kind]
            self.places[of_kind] = torch.arange(of_kind.numel())
            self._nodes.append(n_id[of_kind])
        for layer in range(1, num_layers):
            is_read = last[known] > layer
            self._counts.append([int((is_read & (kinds == kind)).sum()) for kind in range(len(offsets) - 1)])
        self._tables: list[RowsOfTypes] = []
        self._pass: LayerPass | None = None

    @property
    def is_planned(self) -> bool:
        """Whether the ranks have found out what they compute and send."""
        return self._pass is not None

    def plan(self, work: LayerPass) -> None:
        """Find out what the ranks compute and send. Collective."""
        self._pass = work
        wanted = [torch.cat(self._first(counts)).sort().values for counts in self._counts]
        if wanted:
            work.plan(wanted)

    def refresh(self, module: LightningModule) -> None:
        """Compute the rows anew, each on the rank that owns its node. Collective."""
        assert self._pass is not None
        layers = layers_in(module)
        self._check(layers)
        with torch.no_grad(), _in_evaluation(module):
            tables = self._pass.tables(layers[:-1])
            self._tables = [self._taken(table, counts) for table, counts in zip(tables, self._counts, strict=True)]

    def __call__(self, batch: RunsLayers, layers: Sequence[Layer]) -> Any:
        """Run the layers on a batch of the part, and return the rows of its seeds. Not collective."""
        self._check(layers)
        if len(self._tables) < len(self._counts):
            raise RuntimeError(
                "boundary=History() knows no rows yet: a strategy of rounds has ranks compute them when a fit starts "
                "and at every meeting, so batches of a part can be computed on in a fit alone."
            )
        return layers_on_blocks(
            list(layers), batch, seen_by_layers(batch), lambda rows, layer: self._replaced(batch, rows, layer)
        )

    def _first(self, counts: Sequence[int]) -> list[Tensor]:
        return [nodes[:count] for nodes, count in zip(self._nodes, counts, strict=True)]

    def _taken(self, tables: LayerRows, counts: Sequence[int]) -> RowsOfTypes:
        assert self._pass is not None
        device = self._pass.work.device
        return [rows if rows is None else rows.to(device) for rows in tables.take(self._first(counts))]

    def _replaced(self, batch: RunsLayers, rows: RowsOfTypes, layer: int) -> RowsOfTypes:
        """Return a layer's rows with those of the last meeting for nodes outside the part."""
        replaced = RowsOfTypes()
        for store, own, table in zip(batch.node_stores, rows, self._tables[layer], strict=True):
            if own is not None and table is not None:
                places = store[PLACE][: len(own)]
                outside = ((places >= 0) & (places < len(table))).nonzero().view(-1)
                if outside.numel():  # a table that no rank has rows of has no width either
                    own = own.index_copy(0, outside, table[places[outside]].to(own.dtype))
            replaced.append(own)
        return replaced

    def _check(self, layers: Sequence[Layer]) -> None:
        if len(layers) != self.num_layers:
            raise ValueError(
                f"layers() returns {len(layers)} layers, and the sampler has {self.num_layers} hops: give it one hop "
                f"for each layer, NeighborSampler([10] * {len(layers)}) or WholePartSampler({len(layers)})."
            )


class MeetingChannel(Channel):
    """A channel whose failure names the rank that did not answer.

    Args:
        channel: What it sends by; it must not be used any more.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel._group, channel.size, channel.rank, channel.device)
        self.is_of_boundary = True

    def exchange(self, pieces: Sequence[Tensor], lengths: Sequence[int] | None = None) -> list[Tensor]:
        try:
            return super().exchange(pieces, lengths)
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {self.rank} exchanged rows of boundary=History() at a meeting, and {self.who_is_gone()} did not "
                "answer. See what was said there."
            ) from error


@contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


def _last_readers(part: Graph, is_inside: Tensor, num_layers: int) -> Tensor:
    """The last layer that reads each node on the way to the seeds of a part, counted from 1.

    It is 0 for nodes inside, and where no layer does.
    """
    last, computed = torch.zeros(part.num_nodes, dtype=torch.int64), part.split("train")
    for layer in range(num_layers, 0, -1):
        senders = part.indices[edge_positions(part.indptr, computed)].to(torch.int64).unique()
        last[senders] = last[senders].clamp(min=layer)
        computed = torch.cat([computed, senders[is_inside[senders]]]).unique()
    return last.masked_fill(is_inside, 0)


@dataclass(frozen=True)
class History(Boundary):
    """Senders outside a part are known by the rows that their owners computed at the last meeting.

    At a meeting of a strategy of rounds, once replicas are equal, the ranks compute the nodes at the boundary together,
    layer by layer and exactly, without dropout: each rank those that it owns. In the local steps that follow, these are
    the rows that the layers behind the first read of nodes outside the part, and no gradient goes through them (DIGEST,
    arXiv:2206.00057; GNNAutoScale, arXiv:2106.05609). Their input rows are read from the graph together with the part.
    So a node of the part sees all its neighbours in every layer, and between meetings nothing is sent.

    A node belongs to the rank whose training nodes are in its chunk. A rank that holds another chunk beside, as with
    :class:`Rotate`, computes its nodes for itself, as they receive from all their in-neighbours too; so are
    ``extra_nodes``. Only nodes that nobody here computes have rows of the last meeting.

    It takes a module with a method ``layers`` (see :func:`through_layers`) and a strategy of rounds, such as
    :class:`LocalSGDStrategy`, :class:`LLCGStrategy` or :class:`TMAStrategy`. Parts may change at meetings alone.
    """

    keeps_rows = True

    def check_settings(self, settings: BatchSettings) -> None:
        if settings.leaves_types_out:
            raise ValueError(
                f"boundary=History() computes rows by edges of all types, and {settings.training_sampler} leaves some "
                "out: give each edge type a number above 0, or take boundary=Halo()."
            )
        if any(isinstance(sampler, SeesByTime) for sampler in settings.samplers):
            raise ValueError(
                "boundary=History() keeps one row of each node, whatever the time of the seed that reads it, and "
                f"{settings.training_sampler} draws by time: take Isolated(), Halo() or Fetch()."
            )

    def check_in_fit(self, trainer: Trainer) -> None:
        found = against_running_layers(trainer.lightning_module)
        if not isinstance(trainer.strategy, TrainsReplicasApart):
            found = (
                f"{type(trainer.strategy).__name__} has no meetings: use LocalSGDStrategy(), LLCGStrategy() or "
                "TMAStrategy(), or with this strategy boundary=Exchange() or Halo()."
            )
        if found is not None:
            raise ValueError("boundary=History() takes rows of inner layers that ranks compute at meetings. " + found)

    def wrap(self, home: LocalGraph) -> MeetingRows:
        return MeetingRows(home)

    def hooks(self) -> list[MeetingHook]:
        return [KeptRows()]

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        return Halo().around(graph, residents, edges_into, seed)
