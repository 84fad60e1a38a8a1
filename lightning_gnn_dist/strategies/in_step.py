"""How ranks that exchange gradients at every step keep in step: a stop on one is a vote, and all sum all gradients.

Lightning lets a rank go as soon as its own ``trainer.should_stop`` is set, and the others wait for its gradients for
ever. So inside an epoch the exchange of the next step carries the wish, and all ranks leave after that step. After a
validation and at the end of an epoch all ranks vote at once, and leave there. Beside their votes they send a checksum
of weights and settings, which ends ranks that have come to train different models.

DDP sums a gradient when all ranks have one. A rank whose loss does not depend on a parameter has none, and the others
would wait for it. Its share of the gradient is zero, so here it hands in zeros, after its backward pass. Parameters
that are frozen or unfrozen during a fit are not DDP's either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from lightning_gnn_dist.rounds.lightning_internals import Replaced, announce_sigterm, hear_skips
from lightning_gnn_dist.rounds.meeting import log_figures
from lightning_gnn_dist.wire import collectives


class StepCallback(Callback):
    """Stands where strategies have no hook: at the end of a batch or an epoch, and where Lightning looks to leave.

    Args:
        strategy: The strategy, which begins each fit.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def begin(self, trainer: Trainer, replaced: Replaced) -> None:
        """Begin a fit, and stand around the loops' looks at ``trainer.should_stop``."""
        self.skips = False  # what on_train_batch_start of the module said for the step that begins
        self._has_spoken = self._has_validated = self._wants_to_stop = self._is_agreed = False
        self._sums: Tensor | None = None  # of the votes of the step that runs
        self._votes: list[float] | None = None  # the same, once they are read
        self._trainer, loop = trainer, trainer.fit_loop.epoch_loop
        replaced.watch(loop, "on_run_start", after=self._hold)
        replaced.watch(loop, "on_advance_end", before=self._before_step_ends, after=self._after_step)
        replaced.watch(trainer.fit_loop, "on_advance_end", after=self.vote)
        hear_skips(replaced, trainer.lightning_module, self)

    # Votes: for a stop, for SIGTERM, for the end of the epoch, and that some parameter had no part in the loss.

    def own_votes(self) -> list[bool]:
        """Return this rank's votes for the exchange of a step."""
        strategy = self.strategy
        return [self._wants_to_stop, strategy.sigterm_received, self.skips, strategy.used.is_unfinished]

    def take(self, sums: Tensor) -> None:
        """Take the sums of all ranks' votes; refuse ranks that disagree on whether there is a step at all."""
        self._sums, self._votes = sums, None
        # A rank that leaves may wait for the numbers. Where they are summed on the CPU, so may all.
        if (self.skips or not sums.is_cuda) and 0 < (skips := int(self._read()[2])) < collectives.world_size():
            here = "this one too" if self.skips else "but not on this one"
            raise RuntimeError(
                f"on_train_batch_start returned -1, which leaves the epoch, on {skips} of {collectives.world_size()} "
                f"ranks, {here}. Gradients are exchanged at every step, so all ranks must leave at the same one: decide"
                " by what is the same on all ranks, or set trainer.should_stop = True, which one rank may do for all."
            )

    def read_with(self, number: Tensor) -> float:
        """Return the number in a tensor of the device, and read the votes with it: the host waits once for both."""
        if self._sums is None or self._votes is not None:
            return float(number)
        found, *self._votes = torch.cat([number.to(self._sums.dtype).view(1), self._sums]).tolist()
        return float(found)

    def vote(self) -> None:
        """Stop here if any rank wants to; refuse ranks that have come to train different models. Collective."""
        wants, strategy = self._wants_to_stop or self._trainer.should_stop, self.strategy
        replica = strategy._replica(weights=not strategy.processors_differ)
        own = [wants, strategy.used.is_unfinished, replica.checksum()]
        stops, unused, checksums = zip(*collectives.gather_numbers(own, strategy.root_device), strict=True)
        self._act_on(sum(stops), 0, sum(unused))
        replica.compare(checksums)
        self._trainer.should_stop |= self._is_agreed

    def _read(self) -> list[float]:
        if self._votes is None:
            assert self._sums is not None
            self._votes = self._sums.tolist()
        return self._votes

    def _act_on(self, stop: float, sigterm: float, unused: float) -> None:
        if unused == collectives.world_size():
            self.strategy.used.judge(type(self.strategy).__name__, self.strategy.root_device)
        if sigterm:
            rank_zero_info("SIGTERM: all ranks stop after this step.")
            announce_sigterm(self._trainer)
        self._is_agreed |= stop > 0

    def _hold(self) -> None:
        """Keep this rank until the others know that it wants to leave."""
        if self._is_agreed or collectives.world_size() == 1:
            self._trainer.should_stop |= self._is_agreed
        elif self._trainer.should_stop:
            self._wants_to_stop, self._trainer.should_stop = True, False

    def _before_step_ends(self) -> None:
        """Act on the votes of the step before Lightning looks at ``should_stop`` to validate or leave. Collective."""
        if self._sums is not None:
            stop, sigterm, _, unused = self._read()
            self._act_on(stop, sigterm, unused)
        self._sums = None
        self._hold()

    def _after_step(self) -> None:
        if self._has_validated:  # on all ranks or on none: they count the same steps
            self._has_validated = False
            self.vote()

    # What Lightning calls.

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            _say_what_is_weighed(batch, self.strategy.weights)
            _say_what_is_not_learned(batch, trainer, self.strategy.root_device)
        if trainer.is_last_batch:  # a checkpoint may be written next
            self.strategy.average_buffers()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.strategy.average_buffers()  # max_steps ends an epoch at any batch
        log_figures(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.strategy.average_buffers()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_validated = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # First of all callbacks. A SIGTERM ends all ranks at one place, whatever else may end this one alone.
        self.strategy.is_alone = not isinstance(exception, SIGTERMException)


def _say_what_is_weighed(batch: Any, weights: str) -> None:
    coverage = getattr(batch, "coverage", None)
    if coverage is None or getattr(batch, "weighed_by_coverage", False) or weights != "coverage":
        return
    seeds = coverage[: batch.batch_size]
    if bool((seeds != seeds[:1]).any()):
        rank_zero_info(
            "training_step returns one number for a batch, so whole batches are weighed, by the mean coverage of "
            "their seeds. To weigh nodes, return coverage_mean(losses, batch)."
        )


def _say_what_is_not_learned(batch: Any, trainer: Any, device: torch.device) -> None:
    """Log how many training nodes of all ranks have weight 0. Collective."""
    own = getattr(trainer.datamodule, "uncovered", (0, 0))  # another's does not say
    uncovered, seeds = (sum(numbers) for numbers in zip(*collectives.gather_numbers(own, device), strict=True))
    if uncovered and getattr(batch, "weighed_by_coverage", False):
        rank_zero_info(
            f"Training nodes without a neighbour in their part: {uncovered} of {seeds}. Beside others coverage_mean "
            "gives them weight 0. Coverage(shrinkage=1.0) gives them some; boundary=Halo() or MetisPartitioner() show "
            "them their neighbours."
        )


@contextmanager
def counting_unfrozen(module: LightningModule) -> Iterator[None]:
    """Let what exchanges gradients, and is made in the block, count parameters that a ``BaseFinetuning`` unfreezes.

    It freezes them before DDP is made, which then would never exchange their gradients. Until then they send zeros.
    """
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    unfreezes = any(isinstance(callback, BaseFinetuning) for callback in callbacks)
    frozen = [each for each in module.parameters() if unfreezes and not each.requires_grad]
    with _training([each for each in frozen if each.is_floating_point() or each.is_complex()]):  # integers cannot
        yield


@contextmanager
def _training(frozen: Collection[Tensor]) -> Iterator[None]:
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class UsedParameters:
    """Knows which parameters got a gradient in a backward pass. Make it right after DDP, which sees the same ones.

    Args:
        named: The parameters of a module, but for those that DDP leaves alone.
        hands_in_zeros: Whether to hand in zeros for unused parameters; False if DDP looks for them itself.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]] = (), *, hands_in_zeros: bool = False) -> None:
        self.is_unfinished = False  # whether the last loss did not use some parameter, and nothing was said of it
        self.of_types = False  # whether batches have types
        self._unused: set[Tensor] = set()  # trained, and without a part in the last loss of this rank
        self._has_told = False  # of those that no rank uses
        self._names, self._frozen = dict[Tensor, str](), dict[Tensor, str]()
        for name, parameter in named:
            (self._names if parameter.requires_grad else self._frozen)[parameter] = name
        self._used: set[Tensor] = set()
        self._asked = [*self._names] if hands_in_zeros else []
        self._handles = [each.register_post_accumulate_grad_hook(self._used.add) for each in self._asked]

    def settle_buckets(self, prepare: Callable[[list[Tensor]], None], *, counts: bool) -> None:
        """Let DDP choose its lasting buckets before the first step, by a pass of zeros from the last parameter on.

        Left alone, DDP deals gradients out anew after the first step, in the order in which they came. Their places
        decide in which order three ranks or more are summed, so a run that goes on from a checkpoint, whose first step
        is a later one, would end in other digits than the run that never stopped. Collective: it sends the zeros once.

        Args:
            prepare: DDP's preparation of a backward pass, ``prepare_for_backward`` of its reducer.
            counts: Whether DDP itself sends the zeros, whose bytes are counted.
        """
        prepare([])
        for parameter in reversed([*self._names]):
            torch.autograd.backward(parameter, torch.zeros_like(parameter))
        if counts:
            collectives.count_all_reduce(self._names)
        for parameter in self._names:
            parameter.grad = None

    def begin(self) -> None:
        """Get ready for a backward pass; refuse parameters that were unfrozen since the fit began."""
        self._used.clear()
        for parameter, name in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"The parameter {name} was frozen when the fit began and is trained now. The exchange of gradients "
                    "is made for those that train at the start, so its own would stay on each rank: freeze it later, "
                    "in on_train_start of the module or of a callback, unfreeze it by a BaseFinetuning, or start "
                    "another fit."
                )

    def hand_in_zeros(self) -> None:
        """Hand in zeros for unused parameters, so that DDP's exchange in the background goes on. Not collective."""
        missing = [each for each in self._asked if each not in self._used]
        frozen = {each: each.grad for each in missing if not each.requires_grad}
        self._unused = {*missing} - frozen.keys()
        self.is_unfinished = bool(self._unused) and not self._has_told
        if not missing:
            return
        for parameter in frozen:
            parameter.grad = None  # of an earlier step: what is there afterwards has come from other ranks
        with _training(frozen):
            torch.autograd.backward(missing, [torch.zeros_like(parameter) for parameter in missing])
        for parameter, gradient in frozen.items():
            if parameter.grad is not None and bool(parameter.grad.any()):
                raise RuntimeError(
                    f"The parameter {self._names[parameter]} is frozen on rank {collectives.rank()} and trained on "
                    "others, so the replicas would part: freeze it on all ranks at the same step, or on none."
                )
            parameter.grad = gradient

    def judge(self, strategy: str, device: torch.device) -> None:
        """Refuse parameters that no rank's loss depended on; in a model of types tell of them. Collective.

        All ranks know that each has unused ones. The last layer of a ``HeteroConv``, or of what ``to_hetero`` makes,
        computes rows of all types, and the loss reads those of the seeds. The gradients of the others' weights have
        been zero so far, and stay so.
        """
        marks = torch.tensor([float(each in self._unused) for each in self._names], device=device)
        collectives.sum_(marks)
        pairs = zip(self._names.values(), marks.tolist(), strict=True)
        names = [name for name, ranks in pairs if ranks == collectives.world_size()]
        if names and not self.of_types:
            raise RuntimeError(
                f"{', '.join(names)} had no part in the loss that training_step returned, on any rank. If that is "
                f"meant, use {strategy}(find_unused_parameters=True); if they never have, freeze them with "
                "requires_grad_(False)."
            )
        if names:
            self._has_told, self.is_unfinished = True, False
            named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            rank_zero_info(
                f"{named} had no part in the loss that training_step returned, on any rank, as the last layer's "
                "weights of types without seeds have none. Their gradients count as zero."
            )

    def close(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()
