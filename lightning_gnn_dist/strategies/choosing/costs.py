r"""The cost model: what each named choice takes for a pass over the training nodes, and which takes least.

With :math:`s` a local step, :math:`g` one that exchanges gradients, :math:`m` an exchange of a few numbers, :math:`x`
of the model, :math:`r` of the model in 8 bits a number, and :math:`h` a gradient of a batch of the whole graph, all in
seconds as a probe measures them on the slowest rank, a step of each choice takes, with rounds of :math:`K` steps,

.. math::
    \text{Grappa: } g \qquad
    \text{in 8 bits: } \max(s,\, g - x + r) \qquad
    \text{averaging: } s + \frac{3 m + x}{K} \qquad
    \text{with overlap: } s + \frac{3 m + \max(0,\, x - K s)}{K}

.. math::
    \text{LLCG: } s + \frac{(4 + S) m + (2 + S) r + x + (S + A) h + A s}{K},\quad S = \lceil K / 10 \rceil \qquad
    \text{with overlap: } s + \frac{4 m + r + \max(0,\, r + x - K s) + A (h + s)}{K}

where :math:`A`, at most 4, are the batches of an anchor. These seconds are multiplied by the passes that a choice needs
to be as accurate as Grappa after one, as measured on real graphs (``passes`` of a choice). For averaging alone they
follow what the probe has seen: with :math:`p` the passes of the choice, :math:`L_0` the training loss before the
probe's steps, :math:`L_g` behind those that exchange gradients and :math:`L_a` behind as many without, once averaged,

.. math::
    \text{passes of averaging} = p \, \frac{L_0 - L_g}{L_0 - L_a} .

It counts where the parts are alike (:mod:`lightning_gnn_dist.partition.advice`). Of the choices that cost at most 1.2
times the least, the first is taken, in the order in which they lose accuracy.

Ranks of unequal speed wait for the slowest in all of these, and not in rounds by time (:class:`TMAStrategy`), whose
average knows no :math:`K` that all ranks reach: it is named beside the choice where averaging, with the harmonic mean
of all ranks' local steps for :math:`s`, would cost less than 1 / 1.2 of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_gnn_dist.strategies.choosing.choices import CHOICES, SHORT, Choice

VOTES = 3  # exchanges of a few numbers at a meeting
ANCHOR = 4  # batches of the gradient of Drift(), at most
NEAR = 1.2  # a choice that loses less is taken if it costs no more than so many times as much


class Steps(NamedTuple):
    """Training steps of one kind.

    Attributes:
        seconds: Of a step on the slowest rank, with the wait for its batch.
        in_pass: How many there are in a pass over the training nodes, on each rank.
    """

    seconds: float
    in_pass: int


@dataclass(frozen=True)
class Measured:
    """What a probe of a fit has found, in seconds.

    Args:
        gradients: Steps that exchange gradients, on the parts of ``GrappaStrategy``.
        local: Steps without an exchange, on the parts of strategies of rounds.
        message: An exchange of a few numbers.
        exchange: An exchange of the model.
        rounded: The same in 8 bits a number.
        correction: A gradient of a batch of the whole graph; None where the fit has none.
        by_time: A local step if no rank waits for another: the harmonic mean over ranks. None: that of the slowest.
        against_averaging: Why averaging alone loses accuracy on these parts; None where it loses little.
        against_rounds: Why the fit cannot be trained in rounds; None where it can.
        progress: How much training loss steps without an exchange have taken away, once averaged, for 1 of as many
            that exchange gradients. None where it was not measured.
        schedules: Names of those of learning rates that count epochs, and are as long whatever ``max_epochs`` is.
    """

    gradients: Steps
    local: Steps
    message: float
    exchange: float
    rounded: float
    correction: float | None
    by_time: float | None = None
    against_averaging: str | None = None
    against_rounds: str | None = None
    progress: float | None = None
    schedules: tuple[str, ...] = ()

    def seconds_of_step(self, choice: Choice) -> float:
        """Return what a step takes, with its share of a meeting."""
        if choice.steps is None:
            as_they_are = self.gradients.seconds
            if "bits" not in choice.settings:
                return as_they_are
            return max(self.local.seconds, as_they_are - self.exchange + self.rounded)
        return self.local.seconds + self._seconds_of_meeting(choice, choice.steps) / choice.steps

    def _seconds_of_meeting(self, choice: Choice, steps: int) -> float:
        """Return what a meeting adds to the steps of a round."""
        of_round, votes = steps * self.local.seconds, VOTES * self.message
        if not choice.corrects:
            late = self.exchange
            return votes + (max(0.0, late - of_round) if choice.overlaps else late)
        assert self.correction is not None
        anchor = min(ANCHOR, self.local.in_pass)
        gradients = anchor * (self.correction + self.local.seconds)
        late = self.rounded + self.exchange  # the mean, and two moments in 16 bits
        one = self.message + self.rounded
        if choice.overlaps:
            return votes + one + max(0.0, late - of_round) + gradients
        corrections = math.ceil(steps / 10)
        return votes + (1 + corrections) * one + late + gradients + corrections * self.correction

    def seconds_of_pass(self, choice: Choice) -> float:
        """Return what a pass over the training nodes takes."""
        steps = self.gradients if choice.steps is None else self.local
        return steps.in_pass * self.seconds_of_step(choice)

    def passes(self, choice: Choice) -> float:
        """Return how many passes a choice needs to be as accurate as Grappa after one."""
        return choice.passes_at(self.progress)

    def why_not(self, choice: Choice) -> str | None:
        """Return why a choice is out of the question, or None."""
        if choice.steps is None:
            return None
        if self.against_rounds is not None:
            return self.against_rounds
        if choice.corrects:
            return "there is no gradient of the whole graph to correct by" if self.correction is None else None
        return self.against_averaging


class Priced(NamedTuple):
    """What a choice costs.

    Attributes:
        name: That of the choice.
        seconds: Of a pass over the training nodes.
        to_accuracy: Of as many passes as make it as accurate as Grappa after one.
    """

    name: str
    seconds: float
    to_accuracy: float


@dataclass(frozen=True)
class Decision:
    """What is chosen, beside all that was possible.

    Args:
        name: Of the choice.
        measured: What decided.
        prices: Of all choices that are possible, in the order of their names.
    """

    name: str
    measured: Measured
    prices: tuple[Priced, ...]

    @property
    def choice(self) -> Choice:
        return CHOICES[self.name]

    @property
    def lines(self) -> list[str]:
        """What is chosen and why, what it costs, what the runner-up would have cost, and what is left to do."""
        own = next(price for price in self.prices if price.name == self.name)
        others = sorted((price for price in self.prices if price is not own), key=lambda price: price.to_accuracy)
        return [
            f"Chosen: {self.choice}. {self._reason()}",
            f"A pass over the training nodes will take {_in_words(own.seconds)}.{self._by_time(own)}",
            *map(self._as_runner_up, others[:1]),
            *self._of_schedules(),
        ]

    def _as_runner_up(self, price: Priced) -> str:
        choice = CHOICES[price.name]
        passes = self.measured.passes(choice)
        needs = "" if passes == 1 else f", and needs {passes:.2g} times as many passes as Grappa"
        return f"The runner-up, {choice}, would take {_in_words(price.seconds)}{needs}."

    def _of_schedules(self) -> list[str]:
        """Return what becomes of schedules that know nothing of rounds."""
        if self.choice.steps is None:
            return []
        return [
            f"{name} counts epochs, which now are rounds of {self.choice.steps} steps and no passes: take its length "
            "from trainer.max_epochs, which it does not follow."
            for name in self.measured.schedules
        ]

    def _by_time(self, own: Priced) -> str:
        """Return what rounds by time would spare, where ranks are unequal enough; else nothing."""
        found, averaging = self.measured, CHOICES["averaging"]
        if found.by_time is None or found.why_not(averaging) is not None:
            return ""
        unhindered = replace(found, local=found.local._replace(seconds=found.by_time))
        seconds = unhindered.seconds_of_pass(averaging)
        passes = found.passes(averaging)
        if NEAR * passes * seconds >= own.to_accuracy:
            return ""
        return (
            f" Waiting for the slowest rank costs {1 - found.by_time / found.local.seconds:.0%} of the steps: "
            f"TMAStrategy(EverySeconds({SHORT * found.by_time:.2g})), where no rank waits, would take "
            f"{_in_words(seconds)}, and needs {passes:.2g} times as many passes as Grappa."
        )

    def _reason(self) -> str:
        found = self.measured
        share = found.exchange / found.local.seconds
        wire = f"An exchange of the model takes {_in_words(found.exchange)}, {share:.0%} of a local step"
        if found.against_rounds is not None:
            return f"{wire}. Rounds are not among the choices. {found.against_rounds}"
        if found.against_averaging is not None:
            why, *_ = found.against_averaging.split(". ")  # the advice behind it is for who chooses by hand
            return f"{wire}. Averaging alone is not among the choices. {why.removesuffix('.')}."
        return f"{wire}."


def choose(measured: Measured) -> Decision:
    """Return what takes least time to the same accuracy; of those near that, what loses least and is simplest."""
    prices = [
        Priced(name, seconds := measured.seconds_of_pass(choice), measured.passes(choice) * seconds)
        for name, choice in CHOICES.items()
        if measured.why_not(choice) is None
    ]
    return Decision(taken(prices).name, measured, tuple(prices))


def taken(prices: Sequence[Priced]) -> Priced:
    """Return the first, in the order in which choices lose accuracy, that costs near the least."""
    least = min(price.to_accuracy for price in prices)
    return next(price for price in prices if price.to_accuracy <= NEAR * least)


def _in_words(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
