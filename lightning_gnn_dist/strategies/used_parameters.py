"""Parameters that DDP does not handle: unused in one rank's loss, or frozen or unfrozen during a fit.

DDP sums a gradient when all ranks have one. A rank whose loss does not depend on a parameter has none, and the others
would wait for it. Its share of the gradient is zero, so here it hands in zeros, after its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_gnn_dist.wire import collectives


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
