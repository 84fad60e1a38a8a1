"""What Lightning is told of the place of an elastic rank."""

from __future__ import annotations

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from lightning_gnn_dist.wire.membership import Seat


class SoloEnvironment(ClusterEnvironment):
    """Tells Lightning that this rank is alone, whatever launcher started it.

    So none of Lightning's own exchanges can wait for a rank that is dead. Only while the data module deals parts does
    it show the other ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seat(0, 1)
        self._port = find_free_network_port()

    creates_processes_externally = True
    main_address = "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.seen.of

    def global_rank(self) -> int:
        return self.seen.place

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass
