"""Loaders of an evaluation: each rank's share of what is judged, in the whole graph, at the least cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.homes.home import Home
from lightning_gnn_dist.layers.evaluating.choice import Evaluated, is_limited
from lightning_gnn_dist.layers.evaluating.layered_loader import EvaluationLoader, Targets
from lightning_gnn_dist.layers.evaluating.probe import Exactness, Outlook
from lightning_gnn_dist.sampling.base import Sampler


class Judged(NamedTuple):
    """What an evaluation judges.

    Attributes:
        ids: Nodes, or numbers of held edges, of all ranks.
        whose: Says of how many there are, for an error.
        sampler: Returns what draws batches around them, with so many hops more than an evaluation takes.
        num_ids: They lie below this number. Default: the number of nodes.
        targets: Returns what a batch of some of them evaluates.
    """

    ids: Tensor | range
    whose: str
    sampler: Callable[[int], Sampler]
    num_ids: int | None = None
    targets: Callable[[Tensor], Targets] = Targets


class Evaluating:
    """Makes the loaders of evaluations.

    Args:
        home: Where the graph lives.
        probes: Whether a few seeds are looked at before an evaluation.
    """

    def __init__(self, home: Home, *, probes: bool) -> None:
        self._home, self._probes = home, probes and home.running.settings.probes
        self.exactness = self._new_exactness()

    def _new_exactness(self) -> Exactness:
        settings = self._home.running.settings
        return Exactness(settings.of_parts(), settings.evaluation.sampler, probes=self._probes)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"exactness": self._new_exactness()}

    def loader(self, judged: Judged) -> BatchLoader:
        """Return the loader of this rank's share. Collective."""
        run, costs = self._home.running, self._home.costs
        self.exactness.check(run.trainer)
        num_ranks, count = run.num_ranks, len(judged.ids)
        if count < num_ranks:
            raise ValueError(
                f"{judged.whose}, but {num_ranks} ranks share the evaluation: mark more or leave it out, "
                "limit_val_batches=0."
            )
        evaluated = Evaluated(judged.ids, lambda ids: judged.targets(ids).nodes.unique(), num_ranks)
        sampler, model = judged.sampler(0), run.layers_of_model(is_typed=have_names(self._home.types))
        size = run.settings.evaluation.batch_size or run.settings.batch_size
        if run.settings.evaluation.batch_size is None and not is_limited(run.trainer):
            size = costs.batch_size(evaluated, sampler, model)
        source = self._home.whole_source(sampler, judged.num_ids)
        rows, num_batches = costs.ready_rows(evaluated, size, model), evaluated.num_batches(size)
        outlook = Outlook(
            evaluated,
            lambda more_hops: self._home.whole_source(judged.sampler(more_hops), judged.num_ids),
            costs.bytes_around,
            lambda: num_batches == 1 and num_ranks == 1 and costs.is_whole_graph(evaluated.nodes),
        )
        look, num_hops = partial(self.exactness.look, run.trainer, outlook), run.settings.of_parts().num_hops
        make = partial(EvaluationLoader, num_hops, look, rows, judged.targets)
        share, places = (replace(evaluated, ids=ids).share(costs.place) for ids in (judged.ids, range(count)))
        how = run.options_of_loader
        if run.settings.loading.sample_on != "cpu":
            how["bulk_size"] = 1  # full neighbourhoods are large for a device
        return make(source, share, num_batches, seed=run.seed, shuffle=False, inputs=places, **how)
