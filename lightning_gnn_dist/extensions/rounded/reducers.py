"""Means over ranks in few bits, or while they train: at meetings, and of gradients while the backward pass goes on.

    weights      how far a replica has come since the meeting before; what is rounded away is added at the next meeting
    gradients    as they are, in as many bits
    moments      as they are, in 16 bits: their sizes differ too much for eight

Everything else (buffers, counts of steps, frozen weights) goes as it is. The sums are float32, and equal to the bit on
all ranks.

DDP deals the trained parameters out to buckets, from the last to the first, a million numbers or a little more in each.
A bucket that has all its gradients is rounded and sent by a thread, in the same order on all ranks, and its mean takes
the place of the gradients. What is rounded away is added at the next step. Buckets are settled before the first step,
so that a run gives the same bits as the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_fields
from lightning_gnn_dist.extensions.rounded.rounded_mean import Bits, Codec, RoundedMean, means_together
from lightning_gnn_dist.rounds.means import AveragedMoments, OuterStep
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.rounds.reducer import Groups, Reducer, is_rounded, leave_out_, real
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import Background, Channel, open_channel
from lightning_gnn_dist.wire.collectives import scatter_back
from lightning_gnn_dist.wire.hosts import GradientSums, open_channel_of_means

THREAD_NAME = "lightning_gnn_dist.extensions.rounded.reducers"


class RoundedGradients(GradientSums):
    """Averages what DDP would. Make it on all ranks at once.

    Args:
        ddp: torch's module.
        parameters: Those whose gradients are averaged.
        bits: Bits of a number on the wire.
    """

    is_of_ddp = False

    def __init__(self, ddp: Any, parameters: Sequence[Tensor], bits: Bits) -> None:
        self._order = {each: place for place, each in enumerate(parameters)}
        self._codec, self._channel = Codec(bits), open_channel_of_means()
        self._channel.is_waited_for = False
        self._means: dict[int, RoundedMean] = {}  # by the number of the bucket
        self._restored: list[Tensor] = []
        self._number: int | None = None  # None before the first step, when DDP settles its buckets
        self._thread = Background(THREAD_NAME)
        # It refuses a hook whose annotations are text.
        ddp.register_comm_hook(None, lambda _, bucket: self._begun(bucket))

    def begin(self, step: int) -> None:
        """Get ready for a backward pass whose gradients are averaged. The step decides how numbers are rounded."""
        self._number = step << 16

    def close(self) -> None:
        """End what is under way, if that takes no more than some seconds, and the connections. Not collective."""
        self._thread.close()
        self._channel.close()

    def state(self) -> dict[str, Any]:
        """Return what this rank has rounded away, for a checkpoint."""
        lost = [each for place in sorted(self._means) for each in self._means[place].lost]
        return {"lost": lost or self._restored}

    def restore(self, lost: Sequence[Tensor]) -> None:
        """Go on with what was rounded away in the fit of a checkpoint, if its buckets were as large."""
        self._restored, self._means = list(lost), {}

    def _begun(self, bucket: Any) -> Any:
        """Send a bucket that has all its gradients. The thread of autograd calls it."""
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        if self._number is None or self._channel.size == 1:
            future.set_result(buffer)
            return future
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        gradients = real([gradient for _, gradient in sorted(pairs, key=lambda pair: self._order[pair[0]])])
        # A copy on the CPU, which a device has finished: the thread that sends knows nothing of its streams.
        flat = torch.cat([each.detach().reshape(-1) for each in gradients]).cpu()
        place, number = bucket.index(), self._number

        def average() -> None:
            try:
                (mean,) = means_together([self._mean(place, len(flat))], [flat], 1.0, number + place)
                scatter_back(mean, gradients)
                future.set_result(buffer)
            except BaseException as error:  # raised where DDP waits for it
                future.set_exception(error)

        self._thread.submit(average)
        return future

    def _mean(self, place: int, length: int) -> RoundedMean:
        if place not in self._means:
            self._means[place] = RoundedMean(self._channel, self._codec, length)
            saved = self._restored[2 * place : 2 * place + 2]
            if [each.shape for each in saved] == [each.shape for each in self._means[place].lost]:
                self._means[place].lost = saved
        return self._means[place]


_BITS_OF_MOMENTS = 16
_THREAD_NAME = "means"


class RoundedMeans(Reducer):
    """Takes means over ranks in few bits.

    Args:
        bits: Bits of a number on the wire.
    """

    takes_ways = True

    def __init__(self, bits: Bits) -> None:
        self.bits = bits
        self._channel: Channel | None = None
        self._of_pseudo_gradients: RoundedMean | None = None
        self._restored: list[Tensor] = []
        self._number = 0
        self._agreed: set[int] = set()  # what all ranks know to be as long on each of them

    def begin(self) -> None:
        if self._channel is None and collectives.world_size() > 1:
            self._channel = open_channel_of_means()

    def begin_meeting(self, round_idx: int, lengths: Sequence[int] | None = None) -> None:
        """Note the number of the meeting, which decides how numbers are rounded, and what is as long on all ranks."""
        self._number = round_idx << 16
        self._agreed = self._agreed if lengths is None else set(lengths)

    def mean_(self, groups: Groups, weight: float) -> None:
        if self._channel is None:
            super().mean_(groups, weight)
            return
        moments = groups.get("moments", ())
        collectives.average_([*groups.get("whole", ()), *(each for each in moments if not is_rounded(each))], weight)
        rest = {name: groups.get(name, ()) for name in ("pseudo_gradients", "moments", "gradient")}
        rest["moments"] = [each for each in moments if is_rounded(each)]
        given = {name: real(tensors) for name, tensors in rest.items() if tensors}
        flats = [torch.cat([each.detach().reshape(-1) for each in tensors]) for tensors in given.values()]
        means = [self._mean_of(self._channel, name, len(flat)) for name, flat in zip(given, flats, strict=True)]
        is_agreed = self._agreed.issuperset(map(len, flats))
        found = means_together(means, flats, weight, self._number, is_agreed=is_agreed) if means else []
        for flat, tensors in zip(found, given.values(), strict=True):
            scatter_back(flat, tensors)
        self._number += len(given)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def forget(self) -> None:
        self._channel = self._of_pseudo_gradients = None
        self._agreed, self._restored = set(), []

    def lost(self) -> list[Tensor]:
        """Return what rounding has left of this rank's pseudo-gradients, for a checkpoint."""
        return self._restored if self._of_pseudo_gradients is None else self._of_pseudo_gradients.lost

    def restore(self, lost: Sequence[Tensor]) -> None:
        """Go on with what was rounded away in the fit of a checkpoint, if the numbers that ranks send are as many."""
        self._restored = list(lost)

    def _mean_of(self, channel: Channel, name: str, length: int) -> RoundedMean:
        if name != "pseudo_gradients":
            bits = _BITS_OF_MOMENTS if name == "moments" else self.bits
            return RoundedMean(channel, Codec(bits), length, keeps_lost=False)
        if self._of_pseudo_gradients is None or self._of_pseudo_gradients.length != length:
            self._of_pseudo_gradients = RoundedMean(channel, Codec(self.bits), length)
            if [each.shape for each in self._restored] == [each.shape for each in self._of_pseudo_gradients.lost]:
                self._of_pseudo_gradients.lost = self._restored
            self._restored = []
        return self._of_pseudo_gradients


class LateMeans(Reducer):
    """Takes the means of rounds while ranks train, on connections of their own."""

    takes_ways = is_late = True

    def __init__(self) -> None:
        self._channel: Channel | None = None

    def begin(self) -> None:
        if self._channel is None and (size := collectives.world_size()) > 1:
            self._channel = open_channel(size)
            self._channel.is_waited_for = False

    def stage(
        self, outer: OuterStep | None, moments: AveragedMoments | None
    ) -> tuple[list[MeetingHook], list[MeetingHook]]:
        return super().stage(outer, moments) if outer is None else ([], [Overlap(self, outer, moments)])

    def later_(self, groups: Groups, weight: float) -> None:
        """Do what :meth:`mean_` does to tensors in RAM, in a thread, as all ranks do in one order."""
        assert self._channel is not None
        for tensors in groups.values():
            self._channel.average_(tensors, weight)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def forget(self) -> None:
        self._channel = None


@dataclass
class Load:
    """What a rank sends of a round, in RAM, as a checkpoint holds it until it is taken in.

    Attributes:
        places: The numbers of the parameters that were trained.
        pseudo_gradients: Of these.
        moments: Of the optimizers.
        weight: What the rank counts for, 0 where it was left out.
    """

    places: list[int]
    pseudo_gradients: list[Tensor]
    moments: list[Tensor]
    weight: float


class Overlap(MeetingHook):
    r"""The step of the meetings, and the means of moments, a round late. It comes behind what makes means at once.

    Means travel while the next round trains (Streaming DiLoCo, Douillard et al., arXiv:2501.18512).
    With :math:`G_r` the shared model, the same on all ranks, and :math:`\delta_{r,p}` how far rank :math:`p` moves in
    the local steps of round :math:`r`,

    .. math::
        \theta_{r,p} = G_r + \delta_{r-1,p} \quad\text{begins the round, and}\qquad
        G_{r+1} = \mathrm{outer}\Bigl(G_r,\, \sum_p w_p\, \delta_{r-1,p}\Bigr) \quad\text{is known at its meeting:}

    the mean of a round is sent while the next one trains, and is taken in at the meeting behind that. A replica keeps
    what it has learned meanwhile: :math:`\theta_{r+1,p}` is its last weights, and the mean in the place of what it had
    sent. The mean is taken in there even if it has come long before, so that nothing depends on the wire.

    Args:
        means: Sends what a rank has packed.
        outer: Takes the step.
        moments: The moments of optimizers that are averaged, if any.
    """

    averages_gradients = True

    def __init__(self, means: LateMeans, outer: OuterStep, moments: AveragedMoments | None) -> None:
        self._sends, self._outer, self._moments = means, outer, moments
        self._thread: Background | None = None
        self._load: Load | None = None  # what is under way
        self._targets: list[Tensor] = []  # where the means of its moments go
        self._means: tuple[list[Tensor], list[Tensor]] = [], []  # of its pseudo-gradients and moments
        self._sent: Future[None] = Future()
        self._taken: list[Tensor] = []  # the moments that this meeting has made equal

    def members(self) -> list[MeetingHook]:
        return [self, self._outer, *([] if self._moments is None else [self._moments])]

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        for each in self.members()[1:]:
            each.begin(fit)

    def begin_round(self) -> None:
        self._outer.begin_round()
        if self._load is not None:
            self._send(self._load)

    def set_out(self) -> None:
        self._outer.go_ahead(self._ahead())

    @torch.no_grad()
    def contribute(self) -> Groups:
        """Pack what the round has brought, and take in the mean of the one before. The model is the shared one."""
        found, targets = self._outer.pseudo_gradients(self._ahead()), self._tensors_of_moments()
        moments = [_copied(each) for each in targets]
        weight = leave_out_(moments) if self.fit.round.is_left_out else self.fit.weight()
        load = Load([*found], [_copied(each) for each in found.values()], moments, weight)
        self.fit.round.has_mean = self.finish()
        self._outer.go_back()
        self._load, self._targets = load, targets
        return {}

    @torch.no_grad()
    def finish(self) -> bool:
        self._taken = []
        if (load := self._load) is None:
            return False
        with collectives.counted(0.0):
            self._sent.result()
        self._load, (pseudo_gradients, moments) = None, self._means
        means = {place: each.to(self.fit.device) for place, each in zip(load.places, pseudo_gradients, strict=True)}
        self._outer.take(means)
        for target, mean in zip(self._targets, moments, strict=True):
            target.copy_(mean)
        self._taken = self._targets
        return True

    def end(self) -> None:
        if self._thread is not None:
            self._thread.close()

    def sizes(self) -> list[int]:
        return [size for each in self.members()[1:] for size in each.sizes()]

    def equal(self) -> list[Tensor]:
        return self._taken

    def state(self) -> dict[str, Any]:
        state = self._outer.state()
        if self._load is not None:
            state["under_way"] = {**vars(self._load)}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: send once more what was under way."""
        self._outer.restore(state)
        if "under_way" in state:
            saved = state["under_way"]  # of older checkpoints with how it was rounded
            self._load = Load(**{each.name: saved[each.name] for each in fields(Load)})
            self._targets = self._tensors_of_moments()
            self._send(self._load)

    def _send(self, load: Load) -> None:
        if self._thread is None:
            self._thread = Background(_THREAD_NAME)
        self._means = [_copied(each) for each in load.pseudo_gradients], [_copied(each) for each in load.moments]
        groups = dict(zip(("pseudo_gradients", "moments"), self._means, strict=True))
        self._sent = self._thread.submit(partial(self._sends.later_, groups, load.weight))

    def _ahead(self) -> dict[int, Tensor]:
        """Return what leads from where this replica begins the round back to the shared model."""
        if (load := self._load) is None:
            return {}
        ways_back = [each.to(self.fit.device) for each in load.pseudo_gradients]
        return dict(zip(load.places, ways_back, strict=True))

    def _tensors_of_moments(self) -> list[Tensor]:
        return [] if self._moments is None else self._moments.equal()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@dataclass(frozen=True)
class Rounded:
    """Send numbers in few bits, given to a strategy as ``reducer``; what is rounded away is added the next time.

    Strategies of rounds send how far a replica has come since the meeting before, and the gradients of corrections and
    anchors, in so many bits, and moments of optimizers in 16. ``GrappaStrategy`` sends its gradients so, a million
    numbers at a time, the first while the backward pass goes on, unless DDP is to look for unused parameters. Sums are
    float32, and the same to the bit on all ranks. Buffers and counts go as they are.

    Args:
        bits: Bits of a number on the wire.
    """

    bits: Bits = 8

    def __post_init__(self) -> None:
        check_fields(self)

    def of_rounds(self) -> Reducer:
        """Return what takes the means of meetings."""
        return RoundedMeans(self.bits)

    def of_steps(self, ddp: Any, parameters: Sequence[Tensor]) -> GradientSums:
        """Return what takes the means of gradients at every step, in the place of ``ddp``. Collective."""
        return RoundedGradients(ddp, parameters, self.bits)


@dataclass(frozen=True)
class Overlapped:
    """Let the mean of a round travel while the next one trains, given to a strategy of rounds as ``reducer``.

    It is taken in at the meeting behind that: ranks do not wait for the wire, and the mean is a round late. Validation
    and checkpoints see the model that all ranks have in common. Numbers go as they are.
    """

    def of_rounds(self) -> Reducer:
        """Return what takes the means of meetings."""
        return LateMeans()

    def of_steps(self, ddp: Any, parameters: Sequence[Tensor]) -> GradientSums:
        """Refuse: gradients of a step are needed in it."""
        raise ValueError(
            f"reducer={self!r} lets the mean of a round travel while the next one trains, and a step needs its "
            "gradients at once: use reducer=Rounded(8), or a strategy of rounds."
        )
