"""How the whole graph corrects the mean of the replicas: a value of :class:`LLCGStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.checks import (
    MAX_INTEGER,
    MAX_NUMBER,
    is_integer,
    is_number,
    shown,
    takes,
)
from lightning_gnn_dist.gone import of_value
from lightning_gnn_dist.rules import check_fields

Way = Literal["sliced", "rank0"]
Mode = Literal["averaged", "persistent"]
Make = Callable[[list[Tensor]], Optimizer]
Schedule = Callable[[int], float]
OfLocalSteps = Literal["shortened", "local"]


@dataclass(frozen=True)
class Correction:
    r"""How many steps on batches of the whole graph follow a mean, who computes them, and what takes them.

    Args:
        steps: :math:`S`. An integer, or a share of the round's local steps, such as 0.1 (rounded up).
        way: ``"sliced"``: each rank computes a slice of each batch. Or the paper's ``"rank0"``: rank 0 computes the
            whole batch while the others wait, so the step must not call a collective (``self.all_gather``).
        optimizer: An optimizer of the correction's own. ``"averaged"``: like the module's, starting each time from the
            mean state of the ranks. ``"persistent"``: the same, with a state that lives on from round to round. Or a
            function from parameters to an optimizer, which keeps its own learning rate.
        lr: :math:`\gamma`, a number or a function from the round's number to it; or the learning rate of the local
            steps, schedule included (``"local"``), or :math:`S^{-3/4}` times that (``"shortened"``).
    """

    steps: int | float = 0.1
    way: Way = "sliced"
    optimizer: Mode | Make = "averaged"
    lr: float | Schedule | OfLocalSteps = "shortened"

    def __post_init__(self) -> None:
        most = MAX_INTEGER if is_integer(self.steps) else 1
        if not is_number(self.steps) or not 0 < self.steps <= most:
            raise ValueError(
                "steps must be a whole number (2: two steps a round) or a share of the local steps up to 1.0 (0.1: one "
                f"for every ten), got {shown(self.steps)}. For no correction use correction=None."
            )
        check_fields(self)
        if not (self.optimizer in get_args(Mode) if isinstance(self.optimizer, str) else takes(self.optimizer, [])):
            raise ValueError(
                f"optimizer must be one of {list(get_args(Mode))}, or a function from parameters to an optimizer such "
                f"as `lambda parameters: torch.optim.Adam(parameters, lr=0.001)`, got {shown(self.optimizer)}."
                f"{of_value('optimizer', shown(self.optimizer))}"
            )
        if not (self.lr in get_args(OfLocalSteps) if isinstance(self.lr, str) else takes(self.lr, 0)):
            check_lr(self.lr)
        if callable(self.optimizer) and self.lr != "shortened":
            raise ValueError("lr is ignored by an optimizer of your own: leave it out, and set it where you make that.")

    @classmethod
    def as_published(cls, steps: int | float = 1, way: Way = "sliced") -> Correction:
        """Return the paper's: whole steps of an optimizer of its own. ``"rank0"`` is its single server."""
        return cls(steps, way, "persistent", "local")


def check_lr(lr: Any) -> float:
    """Return a learning rate; refuse what is none."""
    if not is_number(lr) or not 0 < lr <= MAX_NUMBER:
        raise ValueError(
            f"lr must be a positive number, a function of the round that gives one, or one of "
            f"{list(get_args(OfLocalSteps))}, got {shown(lr)}."
        )
    return lr  # type: ignore[no-any-return]
