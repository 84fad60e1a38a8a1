r"""Local training with gradients exchanged at every step (Grappa, Xu et al., arXiv:2602.01872).

Every rank trains on its part alone, and the gradients of every step are summed. Weights make up for neighbours that
a part lacks: with :math:`w_v` the weight of seed :math:`v`, all ranks together step along

.. math::
    G = \frac{\sum_v w_v \nabla \ell_v}{\sum_v w_v},
    \qquad\text{rank } r \text{ by way of}\qquad
    \mathcal{L}_r = \frac{P\,W_r}{Z} \cdot \frac{\sum_{v \in r} w_v \ell_v}{W_r},\quad W_r = \sum_{v \in r} w_v,\;
    Z = \sum_r W_r

The second factor is what ``training_step`` returns. The strategy multiplies this loss by the first factor, so it holds
with accumulation, clipping and mixed precision, and corrects for unequal numbers of seeds, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from itertools import compress
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import HeteroData

from lightning_gnn_dist.checks import check_true_or_false
from lightning_gnn_dist.joint import HasParts
from lightning_gnn_dist.rounds import checkpoints, refusals
from lightning_gnn_dist.rounds.launching import Launch
from lightning_gnn_dist.rounds.lightning_internals import datamodule_of
from lightning_gnn_dist.rounds.meeting import log_figures
from lightning_gnn_dist.rounds.own_states import hide_from_ddp
from lightning_gnn_dist.rounds.partitioned_strategy import Buffers, PartitionedStrategy
from lightning_gnn_dist.rounds.reducer import SendsMeans, are_finite, is_scaled, refuse_gradients
from lightning_gnn_dist.strategies.leaving import Leaving
from lightning_gnn_dist.strategies.used_parameters import UsedParameters, counting_unfrozen
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.hosts import GradientSums, HostGradients

Weights = Literal["coverage", "nodes", "uniform"]
# The option not to send buffers at every forward; torch 2.13 has renamed it.
_IS_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
# The weight of a seed without coverage: negligible beside others, and equal where all seeds are without.
_UNCOVERED = 1e-20
# Of a bucket where a reducer sends gradients: a million numbers, so that some travel while others are computed.
_BUCKET_MEGABYTES = 4
_LEAVE_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _IS_RENAMED else "broadcast_buffers": False}


class GrappaStrategy(PartitionedStrategy):
    """Train on parts, exchange gradients at every step, and weigh seeds by the share of neighbours that their part has.

    An epoch is one pass over the training nodes, as with DDP. A step exchanges the gradients and five numbers: the sum
    of the weights, and four counts of ranks that want to leave or lack a gradient. An epoch or a validation averages
    the buffers. The start sends zeros of the size of the gradients once, after which sums have one order for good (but
    with ``static_graph=True``). On parts that see everything this is DDP, with unequal numbers of seeds put right.

    A stop on one rank (``trainer.should_stop``, a timer, a SIGTERM) is a vote: all ranks stop after the next step, or
    at once after a validation and at the end of an epoch. A parameter that had no part in the loss of one rank has a
    gradient of zero there. One that had no part on any rank has a gradient of zero, too, on typed graphs, where the
    last layer's weights of other types than the seeds' have none, and a line says so; elsewhere it is refused. With
    ``find_unused_parameters=True`` it keeps no gradient at all, and the optimizer leaves it alone.

    ``holding``, ``boundary`` and ``coverage`` of :class:`PartitionedDataModule` say what ranks hold and how weights
    are computed. If ``training_step`` returns a mean over seeds, whole batches are weighed; if it returns
    :func:`coverage_mean` of its seeds' losses, each node is.

    Arguments that are not listed are those of :class:`torch.nn.parallel.DistributedDataParallel`.

    Args:
        weights: A rank's share of a step: by the ``"coverage"`` of its seeds (by their number where the data module
            gives no coverage), by their number (``"nodes"``), or ``"uniform"``, as in DDP. Seeds within a rank are
            weighed by coverage in any case if ``training_step`` returns :func:`coverage_mean`.
        buffers: ``"average"`` the buffers (statistics of batch normalisation) at the end of an epoch and before
            validation, or keep them ``"local"``. Unlike in DDP, rank 0's are not sent at every step. A checkpoint
            holds the mean, and also each rank's buffers for a fit that is resumed.
        reducer: What sends gradients in the place of DDP, such as ``Rounded(8)`` in fewer bits. Default: DDP, and on
            several hosts of several ranks in RAM sums within hosts first.
        launch: How ranks are started, and how long they wait for each other.
    """

    strategy_name = "grappa"
    weight_modes: ClassVar[Any] = Weights

    def __init__(
        self,
        *,
        weights: Weights = "coverage",
        buffers: Buffers = "average",
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        reducer: SendsMeans | None = None,
        launch: Launch = Launch(),
    ) -> None:
        refusals.check_reducer(reducer)
        of_ddp = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        check_true_or_false(**of_ddp)
        super().__init__(weights=weights, buffers=buffers, launch=launch, **_LEAVE_BUFFERS, **of_ddp)
        self.leaving: Leaving  # of the fit that runs
        self.is_cut_off = False  # after an exception: the other ranks may be anywhere
        self.used = UsedParameters()
        self.reducer, self._sums = reducer, GradientSums()
        self._losses: list[Tensor] = []  # of this rank, since the last exchange of gradients
        self._factor = torch.ones(())  # of this rank's loss in a step, P W_r / Z, in float64
        self._has_stepped = False  # since buffers were averaged
        self._has_types = False  # whether batches have
        self._companion = StepCallback(self)

    # What its callback and votes ask for.

    def average_buffers(self) -> None:
        """Average the buffers, if asked for and if steps were taken since the last average. Collective."""
        if self.buffers == "average" and self._has_stepped:
            collectives.average_(self._alike(weights=False, buffers=True).values())
        self._has_stepped = False

    def judge_unused(self) -> None:
        """Judge parameters that no rank's loss used. Collective: all ranks know that each has unused ones."""
        self.used.judge(type(self).__name__, self.root_device, has_types=self._has_types)

    # What Lightning calls.

    def configure_ddp(self) -> None:
        looks_itself = bool(self._ddp_kwargs["find_unused_parameters"] or self._ddp_kwargs["static_graph"])
        module = self._module()
        with counting_unfrozen(module):
            trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
            left = {*self.excluded, *(name for name, each in trained.items() if id(each) in self.rows)}
            others = [each for name, each in trained.items() if name not in left]
            for state in self.states:
                state.begin_exchange(type(self).__name__, has_others=bool(others))
            hide_from_ddp(module, left)
            if self.reducer is not None:
                self._ddp_kwargs.setdefault("bucket_cap_mb", _BUCKET_MEGABYTES)
            super().configure_ddp()
            ddp: Any = self.model
            if self.reducer is not None:
                self._sums = self.reducer.of_steps(ddp, others)
            elif collectives.sums_by_hosts(self.root_device):
                self._sums = HostGradients(ddp, collectives.hosts)
            ignored = set(map(id, trained.values())).difference(map(id, others))
            known = [(name, each) for name, each in module.named_parameters() if id(each) not in ignored]
            self.used = UsedParameters(known, hands_in_zeros=not looks_itself)
            if not looks_itself:
                self.used.settle_buckets(ddp.reducer.prepare_for_backward, counts=self._sums.is_of_ddp)

    def on_train_start(self) -> None:
        super().on_train_start()
        self.leaving.vote()  # a hook may have stopped this rank before its first step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Agree on this rank's share of the step, and tell the others what this one wants. Collective."""
        super().on_train_batch_start(batch, batch_idx)
        for state in self.states:
            state.begin_batch()
        own, votes = own_weight(batch, self.weights), self.leaving.own()
        sums = torch.zeros(1 + len(votes), dtype=torch.float64, device=self.root_device)
        for place, number in enumerate([own, *votes]):  # filled in on the device: a copy from RAM would wait for it
            sums[place].fill_(number)
        collectives.sum_(sums)
        self.leaving.take(sums[1:])
        self._has_stepped, self._has_types = True, isinstance(batch, HeteroData)
        # Where nobody has any weight, all batches are fillers.
        self._factor = torch.where(sums[0] > 0, self.world_size * own / sums[0], 0.0)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.used.begin()
        self._losses.append(closure_loss.detach())
        exchanges = getattr(self.model, "require_backward_grad_sync", False)
        if exchanges:
            self._sums.begin(self._module().trainer.global_step)
        loss = super().backward(closure_loss * self._factor.to(closure_loss.dtype), *args, **kwargs)
        if exchanges:
            self.used.hand_in_zeros()
            steps_next = self._module().automatic_optimization  # by hand other backwards may follow before the step
            own_are_finite = [state.exchange_gradients(steps_next=steps_next) for state in self.states]
            self._sums.finish()
            self._take_gradients(own_are_finite=all(own_are_finite))
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        for state in self.states:
            state.have_changed()
        return result

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, NotImplementedError) and "SparseTensorImpl" in str(exception):  # of DDP
            exception.args = (refusals.OTHER_SPARSE.format(""),)
        if "Expected to have finished reduction in the prior iteration" in str(exception):
            exception.args = (
                "Some parameters of the module had no part in the loss that training_step returned. If that is meant, "
                f"use {type(self).__name__}(find_unused_parameters=True); if they never have, freeze them with "
                "requires_grad_(False).",
            )
        super().on_exception(exception)

    def teardown(self) -> None:
        self.used.close()
        self._sums.close()
        super().teardown()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.is_alone:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.is_alone else super().broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if self.is_alone else super().reduce(tensor, *args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.buffers == "average" and self._has_stepped and not self.is_alone:
            checkpoints.average_buffers_of(checkpoint, self._module(), self.excluded)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # What all strategies have.

    @property
    def is_alone(self) -> bool:
        return self.is_cut_off

    def _begin_fit(self, trainer: Trainer) -> None:
        if trainer.world_size > 1 and getattr(trainer, "_val_check_time_interval", None) is not None:
            raise ValueError(
                "val_check_interval as a time lets each rank validate by its own clock, and all must do so after the "
                "same step: give a number of batches or a share of an epoch."
            )
        self.is_cut_off = False
        self._sums = GradientSums()
        self.leaving = Leaving(self, trainer)
        self.leaving.watch(self._replaced)

    def _training_loader(self, loader: Any) -> Any:
        refusals.check_ranks_of_loader(loader, self.world_size)
        length = sized_len(loader)
        rows = collectives.gather_numbers([-1 if length is None else length], self.root_device)
        if [-1] in rows:  # the same on all ranks: all raise or none
            raise TypeError(
                "Gradients are exchanged at every step, so all ranks need as many batches, and this training loader "
                "does not say how many it has. Use PartitionedDataModule, or a loader with a length."
            )
        if len({number for (number,) in rows}) > 1:
            raise ValueError(
                "Gradients are exchanged at every step, so all ranks need as many batches, but their loaders have "
                f"{[number for (number,) in rows]}, in order of rank. Use PartitionedDataModule, which sees to that, "
                "or loaders of one length."
            )
        return loader

    def _of_run(self) -> dict[str, Any]:
        return {"strategy": self.strategy_name}

    def _of_rank(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        return {"buffers": checkpoints.cpu_buffers(self._module()), **self._sums.state()}

    def _take_state(self, checkpoint: dict[str, Any], path: object) -> checkpoints.Resumed | None:
        return checkpoints.take_of_gradients(checkpoint, path)

    def restore_extra_state(self, state: Mapping[str, Any]) -> None:
        for name, buffer in self._module().named_buffers():  # DDP gave all ranks those of rank 0
            if name in state["buffers"]:  # else the module had no such buffer then
                buffer.copy_(state["buffers"][name])
        self._sums.restore(state.get("lost", []))

    def _take_gradients(self, *, own_are_finite: bool) -> None:
        """Count what DDP has sent; refuse a sum that is not finite. Collective then: it is the same on all ranks.

        Args:
            own_are_finite: Whether those are that live with one rank each, which the others do not have.
        """
        found = [(each.grad, each.requires_grad) for each in self._alike().values() if each.grad is not None]
        gradients = [gradient for gradient, _ in found]
        if self._sums.is_of_ddp:  # sparse ones are counted where they are exchanged
            is_sent = [is_trained and not gradient.is_sparse for gradient, is_trained in found]
            collectives.count_all_reduce(compress(gradients, is_sent))
        # Mixed precision skips steps that overflow. The votes are read with the check: one wait for the device a step.
        if not is_scaled(self) and not (own_are_finite and are_finite(gradients, self.leaving.read_with)):
            refuse_gradients(are_finite(self._losses), self.root_device, "loss")
        self._losses = []


def own_weight(batch: Any, weights: str) -> float | Tensor:
    """Return :math:`W_r`, the weight of a rank's batch in a step; 0 for a filler."""
    if getattr(batch, "is_filler", False):
        return 0.0
    if weights == "uniform":
        return 1.0
    size = float(getattr(batch, "num_targets", getattr(batch, "batch_size", 1)))
    coverage = getattr(batch, "coverage", None)
    if coverage is None or weights != "coverage":
        return size
    total = coverage[: batch.batch_size].sum(dtype=torch.float64)
    return torch.where(total > 0, total, _UNCOVERED * size)


class StepCallback(Callback):
    """The callback that the strategy brings along: strategies have no hook at the end of a batch or an epoch."""

    def __init__(self, strategy: GrappaStrategy) -> None:
        self.strategy = strategy
        self._has_spoken = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_spoken = False

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
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.strategy.leaving.has_validated = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # First of all callbacks. A SIGTERM ends all ranks at one place, whatever else may end this one alone.
        self.strategy.is_cut_off = not isinstance(exception, SIGTERMException)


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
    data: HasParts = datamodule_of(trainer)
    own = (0, 0)
    with suppress(AttributeError):  # of another's, which does not say
        own = data.uncovered
    uncovered, seeds = (sum(numbers) for numbers in zip(*collectives.gather_numbers(own, device), strict=True))
    if uncovered and getattr(batch, "weighed_by_coverage", False):
        rank_zero_info(
            f"Training nodes without a neighbour in their part: {uncovered} of {seeds}. Beside others coverage_mean "
            "gives them weight 0. Coverage(shrinkage=1.0) gives them some; boundary=Halo() or MetisPartitioner() show "
            "them their neighbours."
        )
