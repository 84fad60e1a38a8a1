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
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import HeteroData

from lightning_gnn_dist.checks import check_true_or_false
from lightning_gnn_dist.rounds import checkpoints, refusals
from lightning_gnn_dist.rounds.launching import Launch
from lightning_gnn_dist.rounds.partitioned_strategy import Buffers, PartitionedStrategy, hide_from_ddp
from lightning_gnn_dist.rounds.reducer import SendsMeans, are_finite, is_scaled, refuse_gradients
from lightning_gnn_dist.strategies.in_step import StepCallback, UsedParameters, counting_unfrozen
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
    the buffers. The start sends zeros of the size of the gradients once, after which sums have one order for good. On
    parts that see everything this is DDP, with unequal numbers of seeds put right.

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
    is_alone = False  # True after an exception: the other ranks may be anywhere

    def __init__(
        self,
        *,
        weights: Weights = "coverage",
        buffers: Buffers = "average",
        find_unused_parameters: bool = False,
        reducer: SendsMeans | None = None,
        launch: Launch = Launch(),
    ) -> None:
        refusals.check_reducer(reducer)
        check_true_or_false(find_unused_parameters=find_unused_parameters)
        options = {"find_unused_parameters": find_unused_parameters, **_LEAVE_BUFFERS}
        super().__init__(weights=weights, buffers=buffers, launch=launch, **options)
        self.used = UsedParameters()
        self.reducer, self._sums = reducer, GradientSums()
        self._losses: list[Tensor] = []  # of this rank, since the last exchange of gradients
        self._factor = torch.ones(())  # of this rank's loss in a step, P W_r / Z, in float64
        self._has_stepped = False  # since buffers were averaged
        self._companion = self._votes = StepCallback(self)

    def average_buffers(self) -> None:
        """Average the buffers, if asked for and if steps were taken since the last average. Collective."""
        if self.buffers == "average" and self._has_stepped:
            collectives.average_(self._alike(weights=False, buffers=True).values())
        self._has_stepped = False

    # What Lightning calls.

    def configure_ddp(self) -> None:
        module, looks_itself = self._module(), self._ddp_kwargs["find_unused_parameters"]
        with counting_unfrozen(module):
            trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
            of_rows = {
                number for state in self.states for number in state.rows()
            }  # whose gradients have some rows alone
            left = {*self.excluded, *(name for name, each in trained.items() if id(each) in of_rows)}
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
        self._votes.vote()  # a hook may have stopped this rank before its first step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Agree on this rank's share of the step, and tell the others what this one wants. Collective."""
        super().on_train_batch_start(batch, batch_idx)
        for state in self.states:
            state.begin_batch()
        own, votes = own_weight(batch, self.weights), self._votes.own_votes()
        sums = torch.zeros(1 + len(votes), dtype=torch.float64, device=self.root_device)
        for place, number in enumerate([own, *votes]):  # filled in on the device: a copy from RAM would wait for it
            sums[place].fill_(number)
        collectives.sum_(sums)
        self._votes.take(sums[1:])
        self._has_stepped, self.used.of_types = True, isinstance(batch, HeteroData)
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
            found = [each for each in self._alike().values() if each.grad is not None]
            if self._sums.is_of_ddp:  # sparse ones are counted where they are exchanged
                sent = (each.grad for each in found if each.requires_grad)
                collectives.count_all_reduce(each for each in sent if each is not None and not each.is_sparse)
            # Refuses a sum that is not finite, the same on all ranks; mixed precision skips steps that overflow. The
            # votes are read with the check: one wait for the device a step.
            gradients = (each.grad for each in found if each.grad is not None)
            if not is_scaled(self) and not (all(own_are_finite) and are_finite(gradients, self._votes.read_with)):
                refuse_gradients(are_finite(self._losses), self.root_device, "loss")
            self._losses = []
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

    def _begin_fit(self, trainer: Trainer) -> None:
        if trainer.world_size > 1 and getattr(trainer, "_val_check_time_interval", None) is not None:
            raise ValueError(
                "val_check_interval as a time lets each rank validate by its own clock, and all must do so after the "
                "same step: give a number of batches or a share of an epoch."
            )
        self.is_alone = False
        self._sums = GradientSums()
        self._votes.begin(trainer, self._replaced)

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
