"""Local SGD (Stich, ICLR 2019, arXiv:1805.09767); on graph parts, the PSGD-PA of the LLCG paper (arXiv:2111.08202)."""

from __future__ import annotations

from lightning_gnn_dist.rounds.round_strategy import RoundStrategy


class LocalSGDStrategy(RoundStrategy):
    r"""Average the replicas when a round ends, and do nothing else.

    .. math::
        \theta \leftarrow \sum_{p=1}^{P} w_p \theta_p,
        \qquad w_p = \tfrac{1}{P} \;\text{ or }\; \tfrac{n_p}{n}

    A local step does not see neighbours that other ranks hold. On parts that look alike (a random partition) only
    the cut edges are lost; on parts that differ (METIS) replicas drift apart, and the average can be
    much worse than a single process. See :class:`~lightning_gnn_dist.rounds.round_strategy.RoundStrategy` for the
    arguments.
    """

    strategy_name = "local_sgd"
