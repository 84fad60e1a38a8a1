"""The callback that every strategy of rounds brings along: strategies have no hook at the end of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.lightning_internals import announce_sigterm, set_global_step
from lightning_gnn_dist.wire import collectives


class Votes(NamedTuple):
    """What a rank says at a meeting."""

    batches: int
    stop: bool
    sigterm: bool
    checksum: int
    global_step: int


class HoldsMeetings(Protocol):
    """What the callback needs of its strategy."""

    round_idx: int
    in_round: bool
    stop_requested: bool
    seconds_in_round: float

    def begin_round(self) -> None:
        """A batch is here, perhaps the first of a round."""
        ...

    def meet(self, batches: int) -> list[Votes]:
        """End the round."""
        ...

    def shift_gradients(self, optimizer: Optimizer) -> None:
        """Change the gradients that ``optimizer`` is about to use."""
        ...


class MeetingCallback(Callback):
    """Calls the meeting after the last batch of a round, and lets no rank leave before."""

    def __init__(self, strategy: HoldsMeetings) -> None:
        self.strategy = strategy
        self.min_epochs: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.min_epochs = trainer.fit_loop.min_epochs

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # One rank that stops in mid-round would leave the others waiting at the meeting. Lightning finishes an
        # epoch that min_epochs asks for, so a stop takes effect at its end, after the vote.
        running = trainer.fit_loop.epoch_progress.current.processed + 1  # type: ignore[attr-defined]
        trainer.fit_loop.min_epochs = max(running, self.min_epochs or 0)

    def on_train_batch_start(self, *args: Any) -> None:
        self.strategy.begin_round()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # After mixed precision has unscaled the gradients, and before they are clipped.
        self.strategy.shift_gradients(optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not trainer.is_last_batch:
            return
        self.strategy.stop_requested |= trainer.should_stop
        votes = self.strategy.meet(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        # Lightning keys file names, and whether to save at all, on it. Steps between ranks may be unequal.
        set_global_step(trainer, max(vote.global_step for vote in votes))
        if any(vote.stop for vote in votes):
            trainer.should_stop = True
        if any(vote.sigterm for vote in votes):
            rank_zero_info(f"SIGTERM: stopping after round {self.strategy.round_idx}.")
            announce_sigterm(trainer)
        log_figures(
            pl_module,
            {
                "round/index": float(self.strategy.round_idx),
                "round/batches": float(sum(vote.batches for vote in votes)),
                "round/seconds": self.strategy.seconds_in_round,
            },
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.strategy.in_round:
            raise RuntimeError(
                "The epoch ended without a meeting. A hook on_train_batch_start that returns -1 leaves it early: end "
                "rounds by the strategy's clock instead."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.min_epochs = self.min_epochs


def log_figures(module: LightningModule, figures: Mapping[str, float] = MappingProxyType({})) -> None:
    """Log what this rank has sent and waited for, and ``figures``. No collective."""
    own = {"comm/bytes_sent": collectives.traffic.bytes_sent, "comm/seconds": collectives.traffic.seconds}
    of_data = getattr(module.trainer.datamodule, "figures", {})  # type: ignore[attr-defined]
    # With both flags Lightning neither sends nor complains.
    flags: dict[str, Any] = {"sync_dist": True, "rank_zero_only": True}
    module.log_dict({**figures, **own, **of_data}, on_step=False, on_epoch=True, batch_size=1, **flags)
