"""Who holds a part of the graph: each rank one of its own, or the ranks of a host one between them."""

from __future__ import annotations

from itertools import product
from typing import Literal, NamedTuple

from lightning.pytorch import Trainer

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.wire.channel import CPU
from lightning_gnn_dist.wire.collectives import gather_numbers

Per = Literal["rank", "host"]


class Holder(NamedTuple):
    """The ranks that hold one part between them, and which of them this one is.

    Attributes:
        part: The number of their part.
        num_parts: How many parts there are.
        member: The number of this rank among them.
        num_members: How many they are, the same for each part.
    """

    part: int = 0
    num_parts: int = 1
    member: int = 0
    num_members: int = 1

    @classmethod
    def of_host(cls, trainer: Trainer | None) -> Holder:
        """Return the ranks of this host, by what the launcher says of them. Without a trainer there is one."""
        if trainer is None:
            return cls()
        return cls(trainer.node_rank, trainer.num_nodes, trainer.local_rank, trainer.num_devices)

    def check(self, num_ranks: int) -> None:
        """Refuse ranks of which nobody says who share a host. All raise or none. Collective.

        Args:
            num_ranks: How many ranks there are.
        """
        _, num_parts, _, num_members = self
        places = sorted((part, member) for part, _, member, _ in gather_numbers(self, CPU))
        if places != [*product(range(num_parts), range(num_members))] or len(places) != num_ranks:
            raise ValueError(
                f'Holding(per="host") takes num_nodes={num_parts} hosts of devices={num_members} ranks, as the trainer '
                f"says, and its {num_ranks} ranks are told to be (host, number there) {shown(places)}: start equally "
                "many on each host, or leave per out."
            )
