"""Who learns side by side: the ranks, or as many learners as a run is to be the same for on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gnn_dist.batches.deal import Deal
from lightning_gnn_dist.boundary.boundary import Boundary, Fetch, Halo
from lightning_gnn_dist.checks import brief
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.residency import AsRanks
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.joint import TrainsReplicasApart, WeighsRanks
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


@dataclass(frozen=True, eq=False)
class Learners:
    """The learners of a run, and those that one rank has the work of.

    Args:
        count: How many there are.
        own: The numbers of the rank's own.
        whole: The whole graph, where a rank may have several.
        chunks: The learner of each of its nodes.
        batches_of_step: The batches that each rank takes in a step. None: a batch is a step, or what the trainer says.
        member: The number of this rank among those that have the seeds of one part between them.
        num_members: How many they are.
    """

    count: int
    own: tuple[int, ...]
    whole: Graph | None = None
    chunks: Tensor | None = None
    batches_of_step: int | None = None
    member: int = 0
    num_members: int = 1

    def seeds_of_each(self, part: Graph, seeds: Tensor) -> dict[int, Tensor]:
        """Return where the seeds of each own learner stand among those of a part."""
        assert self.chunks is not None
        chunks = self.chunks[seeds if part is self.whole else part.node_arrays["n_id"][seeds]]
        return {learner: (chunks == learner).nonzero().view(-1) for learner in self.own}

    def deals(
        self, part: Graph, seeds: Tensor, inputs: Tensor | None, num_batches: int, seed: int, num_taken: int
    ) -> list[Deal]:
        """Return how each own learner deals its seeds; no two learners draw alike.

        Args:
            part: Where the seeds lie.
            seeds: Their ids, as the source of batches knows them.
            inputs: A number for each of them.
            num_batches: Batches of a pass.
            seed: Decides everything random.
            num_taken: How many seeds a pass takes, of all learners of the rank.
        """
        if self.batches_of_step is None:
            (own,) = self.own
            deal = Deal(seeds, num_batches, seed * self.count + own, inputs=inputs, num_taken=num_taken)
            return [replace(deal, place=self.member, num_places=self.num_members)]
        deals = [
            Deal(seeds[at], num_batches, seed * self.count + own, inputs=None if inputs is None else inputs[at])
            for own, at in self.seeds_of_each(part, seeds).items()
        ]
        fillers = [replace(deals[0], is_filler=True)] * (self.batches_of_step - len(deals))
        return deals + fillers

    def state(self) -> dict[str, int]:
        """Return what a resumed fit must have alike."""
        return {} if self.batches_of_step is None else {"learners": int(self.count)}

    def check_resumed(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on with what other learners have learned from. That there were none, a strategy refuses."""
        before = state.get("learners", self.count)
        if self.batches_of_step is not None and before != self.count:
            raise ValueError(
                f"The checkpoint is of a fit with AsRanks({before}), and AsRanks({self.count}) takes other steps: give "
                f"AsRanks({before}), which any number of ranks may do, or begin a new fit with the weights alone, "
                "Model.load_from_checkpoint(path)."
            )

    def check_strategy(self, trainer: Trainer | None) -> None:
        """Refuse a strategy whose steps are not made of the batches of all learners."""
        if self.batches_of_step is None or trainer is None:
            return
        strategy = trainer.strategy
        if not isinstance(strategy, WeighsRanks) or isinstance(strategy, TrainsReplicasApart):
            raise ValueError(
                f"AsRanks({self.count}) weighs the batches of a step by their seeds, which {type(strategy).__name__} "
                "does not: use Trainer(strategy=GrappaStrategy()), also on one rank."
            )


def check_as_ranks(as_ranks: AsRanks, boundary: Boundary, settings: BatchSettings) -> None:
    """Refuse what would make a learner's batch depend on the nodes that its rank holds beside its own."""
    if isinstance(boundary, Fetch):
        return
    num_hops = settings.of_parts().num_hops
    if not isinstance(boundary, Halo) or boundary != Halo(max(boundary.hops, num_hops)):
        raise ValueError(
            f"{as_ranks} needs batches that do not depend on what a rank holds, and boundary={brief(boundary)} hides "
            f"some of what seeds would see: use boundary=Halo({num_hops}), or Fetch()."
        )
    sampler = settings.of_parts()
    if not isinstance(sampler, NeighborSampler) or sampler.shared or settings.loading.sample_on != "cpu":
        raise ValueError(
            f"{as_ranks} with boundary={brief(boundary)} draws by the ids of the whole graph, which takes a "
            f'NeighborSampler without shared draws and sample_on="cpu", got {sampler} and sample_on='
            f'"{settings.loading.sample_on}": use these, or boundary=Fetch().'
        )
