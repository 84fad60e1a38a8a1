"""The boundary of rows that ranks compute at meetings, as a user passes it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary, EdgesInto, Halo
from lightning_gnn_dist.extensions.history.kept_rows import KeptRows
from lightning_gnn_dist.extensions.history.meeting_rows import MeetingRows
from lightning_gnn_dist.extensions.passes.part_batch import against_running_layers
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.joint import TrainsReplicasApart
from lightning_gnn_dist.rounds.meeting_hook import MeetingHook
from lightning_gnn_dist.sampling.base import SeesByTime


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
