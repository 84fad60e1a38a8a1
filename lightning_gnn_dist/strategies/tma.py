r"""Time-based model aggregation (Zhu et al., ACM TIST 2024, arXiv:2305.09887).

Every rank trains on its own part by its own clock, :math:`k_p` steps in round :math:`r`. When the time is over,

.. math::
    \theta \leftarrow \frac{\sum_p w_p \theta_p}{\sum_p w_p},
    \qquad w_p = 1 \;\text{ or }\; n_p \;\text{ or }\; k_p
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

from lightning.pytorch import Trainer

from lightning_gnn_dist.checks import check_at_least, shown
from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.clock import EveryPass, EverySeconds, RoundClock
from lightning_gnn_dist.rounds.drift import Drift
from lightning_gnn_dist.rounds.launching import Launch
from lightning_gnn_dist.rounds.means import Moments, Outer
from lightning_gnn_dist.rounds.meeting import GathersPeers
from lightning_gnn_dist.rounds.partitioned_strategy import Buffers
from lightning_gnn_dist.rounds.reducer import Nonfinite, SendsMeans
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy

Weights = Literal["uniform", "nodes", "steps"]


class TMAStrategy(RoundStrategy):
    """Average the replicas every so many seconds, however many steps each has taken.

    No rank waits for more than another's last step. With ``RandomPartitioner()`` this is the paper's
    RandomTMA, with ``SuperNodePartitioner(n)`` its SuperTMA: parts that look alike are what makes averaging work.

    All ranks have one ``global_step``: that of the rank with most steps. Schedulers must step once a round
    (``"interval": "epoch"``), and so by time.

    Arguments that are not listed are those of :class:`~lightning_gnn_dist.rounds.round_strategy.RoundStrategy`.

    Args:
        clock: Decides when a round ends. Default: ``EverySeconds(30)``.
        weights: Weigh replicas alike (``"uniform"``), by the training nodes of their parts (``"nodes"``), or by the
            steps they took in the round (``"steps"``).
        peers: Who meets. ``Elastic()`` lets ranks die and come back: each is a process of its own (``devices=1``), and
            the ranks that are alive go on. Default: all ranks, none of which may be missing.
        failed_ranks: Ranks to count as dead from the start, as in the paper's experiments: nobody learns from their
            parts. They take one batch a round, as Lightning needs one, have weight 0, and share in the evaluation and
            in what ``boundary=History()`` computes.
    """

    strategy_name = "tma"
    weight_modes: ClassVar[Any] = Weights

    def __init__(
        self,
        clock: RoundClock | None = None,
        *,
        weights: Weights = "uniform",
        peers: GathersPeers | None = None,
        failed_ranks: Sequence[int] = (),
        buffers: Buffers = "average",
        average_optimizer: Moments = False,
        drift: Drift | None = None,
        nonfinite: Nonfinite = "refuse",
        outer: Outer | None = None,
        reducer: SendsMeans | None = None,
        launch: Launch = Launch(),
    ) -> None:
        super().__init__(
            EverySeconds(30.0) if clock is None else clock,
            weights=weights,  # type: ignore[arg-type]  # this class offers one more
            buffers=buffers,
            average_optimizer=average_optimizer,
            drift=drift,
            nonfinite=nonfinite,
            outer=outer,
            reducer=reducer,
            launch=launch,
        )
        if isinstance(failed_ranks, str | bytes | Mapping) or not isinstance(failed_ranks, Collection):
            raise TypeError(f"failed_ranks must be a list of ranks, such as [3], got {shown(failed_ranks)}.")
        for rank in failed_ranks:
            check_at_least(0, **{"failed_ranks: a rank": rank})
        self.failed_ranks = frozenset(map(int, failed_ranks))
        if peers is not None:
            refusals.check_says("peers", peers, "peers_of", "who meets, as Elastic() does, or be None: all ranks; ")
            self.peers = peers.peers_of(self)
            if self.failed_ranks and self.peers.may_change:
                raise ValueError(f"failed_ranks simulates what peers={shown(peers)} lives through: choose one.")

    @property
    def is_global_zero(self) -> bool:
        return self.peers.is_first(self.global_rank)

    def own_weight(self) -> float:
        if self.global_rank in self.failed_ranks:
            return 0.0
        if self.weights != "steps":
            return super().own_weight()
        if not self.state.batches_of_ranks:  # the anchor of the first round comes before any step
            return 1.0
        return float(self.state.batches_of_ranks[self.global_rank])

    def weight_of_rows(self) -> float:
        # A row counts the steps that have touched it already.
        return float(self.own_weight() > 0) if self.weights == "steps" else self.own_weight()

    def estimated_steps(self) -> float:
        if self.peers.may_change and isinstance(self.clock, EveryPass):
            refusals.refuse_estimate(self.clock, "parts, and so passes, change with the ranks that are alive")
        return super().estimated_steps()

    def _begin_fit(self, trainer: Trainer) -> None:
        ranks = frozenset(range(self.world_size))
        if self.failed_ranks - ranks or self.failed_ranks == ranks:
            raise ValueError(
                f"failed_ranks={sorted(self.failed_ranks)} must name some of the {len(ranks)} ranks, and leave one."
            )
        super()._begin_fit(trainer)

    def _is_over(self, batches: int) -> bool:
        return self.global_rank in self.failed_ranks or super()._is_over(batches)
