r"""How much of each neighbourhood a rank sees, and the weights that follow.

A node whose neighbours lie on other ranks has a wrong gradient. So the loss weighs each node by the share of its
neighbourhood that is left (Grappa, Xu et al., arXiv:2602.01872): with :math:`d_v` of :math:`D_v` in-neighbours here,

.. math::
    c_v = \frac{d_v + \kappa c_0}{D_v + \kappa}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gnn_dist.checks import Amount, Fraction, check_fields, check_tensor, is_integer, shown
from lightning_gnn_dist.graph.graph import Graph

Level = Literal["node", "batch"]


@dataclass(frozen=True)
class Coverage:
    r"""Gives every seed of a batch a weight, ``batch.coverage``.

    Args:
        level: ``"node"`` gives each node its own weight; ``"batch"`` gives all seeds of a batch their mean, so that
            only whole batches are weighed.
        shrinkage: :math:`\kappa`, the number of imagined neighbours that draw a node's weight towards ``prior``.
        prior: :math:`c_0`. Default: the mean coverage of the rank's own nodes.
    """

    level: Level = "node"
    shrinkage: Amount = 0.0
    prior: Fraction | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def weights(self, part: Graph, degrees: Tensor, own: Tensor | slice) -> Tensor:
        """Return the coverage of every node of a part: float32, shape ``(part.num_nodes,)``.

        Args:
            part: The part.
            degrees: In-degrees of the part's nodes in the whole graph, shape ``(part.num_nodes,)``.
            own: Which nodes it learns from; the default prior is their mean.
        """
        prior = 1.0 if self.prior is None else self.prior
        if self.prior is None and self.shrinkage:  # else it counts for nothing
            plain = _shares(part, degrees, 0.0, 0.0)[own]
            prior = float(plain.mean()) if plain.numel() else 1.0  # of no nodes: nothing is missing
        return _shares(part, degrees, self.shrinkage, prior)


def coverage_mean(losses: Tensor, batch: Any) -> Tensor:
    """Return the mean of one loss per seed, weighed by ``batch.coverage``; the plain mean if all weights are 0.

    Return it from ``training_step`` in place of ``losses.mean()``:

        losses = F.cross_entropy(out[:batch.batch_size], batch.y[:batch.batch_size], reduction="none")
        return coverage_mean(losses, batch)
    """
    check_tensor("losses", losses, "one loss per seed")
    if not is_integer(getattr(batch, "batch_size", None)):
        raise TypeError(f"batch must be a batch of a data module, with its batch_size, got {shown(batch)}.")
    if losses.dim() != 1 or losses.numel() != batch.batch_size:
        raise ValueError(
            f"losses must be one loss per seed, {batch.batch_size} in this batch, got shape "
            f'{tuple(losses.shape)}: compute them with reduction="none" on the first batch.batch_size nodes.'
        )
    weights = getattr(batch, "coverage", None)
    if weights is None:
        return losses.mean()
    check_tensor("batch.coverage", weights, "a weight for each node, or each seed")
    if weights.dim() != 1 or weights.numel() < losses.numel() or not weights.is_floating_point():
        raise ValueError(f"batch.coverage must be a vector of a weight for each seed, got {shown(weights)}.")
    # On a device the host would have to wait for the answer, and the data modules put right weights there.
    if weights.device.type == "cpu" and not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError("batch.coverage must hold weights of at least 0, and some are negative, infinite or NaN.")
    batch.weighed_by_coverage = True  # else GrappaStrategy tells that only whole batches are weighed
    weights = weights[: batch.batch_size].to(losses.dtype)
    if not getattr(batch, "is_filler", False):  # a filler counts for nothing, and its mean is 0
        weights = torch.where(weights.sum() > 0, weights, 1)
    total = weights.sum()
    mean: Tensor = (losses * weights).sum() / torch.where(total > 0, total, 1)
    return mean


def _shares(part: Graph, degrees: Tensor, shrinkage: float, prior: float) -> Tensor:
    """Return the formula's weight of each node. A node without in-neighbours misses none and gets 1."""
    share = (part.degrees().to(torch.float32) + shrinkage * prior) / (degrees.to(torch.float32) + shrinkage)
    return share.masked_fill_(degrees == 0, 1.0)
