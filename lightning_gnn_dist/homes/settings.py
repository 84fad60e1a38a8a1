"""Settings that all data modules share: how batches for training, evaluation and corrections are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.checks import (
    Count,
    Natural,
    Seed,
    check_at_least,
    check_fields,
    check_instance,
    check_path,
    whole,
)
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.sampling.base import Sampler, SeesByTime
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler

SampleOn: TypeAlias = Literal["auto", "cpu", "device"]
MAX_THREADS = 1024
MAX_BULK = 1 << 20  # batches that are made together
LEAST_BYTES = 16 << 20  # with less, a sampler's table of nodes would leave no room for a batch
AnySampler = Annotated[Sampler, "an object such as NeighborSampler([15, 10])"]


@dataclass(frozen=True)
class Loading:
    """How batches are made, and what of the arrays they hold. What is drawn does not depend on it.

    Args:
        bulk_size: Batches sampled together. Of shards, rows for them are sent together.
        num_threads: Background threads that sample and gather while the model trains. 0: none. Other ranks are asked
            by one thread, if there is any.
        widen: Arrays of float16 and bfloat16 come as float32. ``"auto"``: but for those of the type that the trainer's
            precision computes in, bfloat16 with ``"bf16-mixed"`` and ``"bf16-true"``, float16 with ``"16-true"``,
            unless they are labels. False: as they are stored.
        sample_on: Where batches are sampled and gathered: ``"cpu"``, or ``"device"``, on the device that trains, which
            then holds a copy of the part, and of the whole graph for evaluation and corrections. ``"auto"``: if it is a
            GPU, it holds as much of these as ``device_bytes`` allow, the part's before the whole graph's: edges, from
            which a ``NeighborSampler`` without ``weight``, a ``LadiesSampler`` or a ``FastGCNSampler`` draws there,
            then the rows of features that training batches read most. Others are gathered in RAM. Of graphs with types,
            rows alone. False receivers of links are drawn in RAM. Of shards: ``"cpu"``.
        device_bytes: Memory of a GPU that all of it may take with ``sample_on="auto"``; with 0 batches come from RAM.
            Default: half of the memory that is free without it.
        all_labels: Batches hold in ``y`` the labels of all their nodes, as label propagation needs them. False: those
            of the seeds alone, so that no loss takes in validation or test nodes, nor some nodes more often.
        ahead_bytes: Memory for batches that are made before they are due, where these need rows of other ranks or of
            files (``cache_bytes``), beside those of the running bulk: as many bulks as fit, at least one. 0: every bulk
            is asked for when it is due.
        cache_bytes: Memory on each rank for rows of a graph in files, or of other shards, of which those stay that
            coming batches need soonest, of all node types together. 0: none stays. Rows of files are read in the
            background by one thread, near ones in one request, where the arrays are larger than this memory. Default:
            64 MiB for shards; rows of files are read through the system's memory map, but for an evaluation of a graph
            that is larger than what is free, whose cache takes an eighth of that.
        check_values: Refuse NaN and infinity in ``x`` and in the edges' ``edge_weight`` and ``edge_attr``, in one pass
            over what the rank trains on, and labels of marked nodes that are infinite, NaN in all columns, or, as
            classes, negative.
    """

    bulk_size: Annotated[int, whole(1, MAX_BULK)] = 4
    num_threads: Annotated[int, whole(0, MAX_THREADS)] = 1
    widen: bool | Literal["auto"] = "auto"
    sample_on: SampleOn = "cpu"
    device_bytes: Natural | None = None
    all_labels: bool = False
    ahead_bytes: Natural = 1 << 29
    cache_bytes: Natural | None = None
    check_values: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.device_bytes is not None and self.sample_on != "auto":
            raise ValueError(
                f'device_bytes ({self.device_bytes}) is what a graph may take of a GPU with sample_on="auto", and '
                f'sample_on is "{self.sample_on}": give sample_on="auto", or leave device_bytes out.'
            )


@dataclass(frozen=True)
class Evaluation:
    """How the whole graph is sampled for validation, testing and prediction.

    Args:
        batch_size: Nodes evaluated at once, or held edges, each with all of its negatives. Default: as many as
            ``bytes`` allow, and at least the data module's ``batch_size``: neighbourhoods overlap, so a few large
            batches cost less than many small ones. Those of a ``TemporalSampler`` do not: at most ``batch_size``.
        sampler: A ``NeighborSampler`` with as many hops as training has, which makes metrics and predictions
            estimates; beside a ``TemporalSampler`` another one. Default: all neighbours within these hops, which makes
            them exact; beside a ``TemporalSampler(pick="latest")``, which draws without chance, the same one.
        bytes: Memory that an evaluation may take on each rank, beside what the rank takes anyway. Default: 4 GiB. It is
            halved until it is at most half of the rank's share of the memory that is free when it begins. Layer by
            layer it is also what may be taken of a GPU's own memory, by default half of what is free there.
        probe: Whether a few seeds are computed with one more hop before the first evaluation, and a model is told that
            sees farther than its batches.
        on: Another graph to evaluate and predict on, as a data module takes one, with the same features and types: one
            with nodes that training does not see. Its masks mark what is validated and tested. Default: the graph
            that is trained on.
    """

    batch_size: Count | None = None
    sampler: Sampler | None = None
    bytes: Annotated[int, whole(LEAST_BYTES)] | None = None
    probe: bool = True
    on: Graph | Data | HeteroData | str | Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sampler is not None:
            kinds = NeighborSampler | SeesByTime
            check_instance("sampler", self.sampler, kinds, "an object such as NeighborSampler([50, 50])")
        if self.on is not None:
            graphs = Graph | Data | HeteroData | str | Path
            check_instance("on", self.on, graphs, "a Graph, a PyG Data, or the path of a saved graph")
            if isinstance(self.on, str | Path):
                check_path("on", self.on)


@dataclass(frozen=True)
class GlobalBatching:
    """How the whole graph is sampled for corrections, and for the gradient that ``Drift("global")`` steers towards.

    Seeds are drawn uniformly from all training nodes or edges. Of edges in shards, which no rank lists, each rank deals
    those into its own shard, evenly over the batches of a pass, so that slices are as unequal as parts.

    Args:
        batch_size: Seeds of one batch, shared by all ranks. Default: the data module's ``batch_size`` for each rank,
            so that a correction step costs about as much as a local one.
        sampler: How neighbours are drawn. Default: the data module's ``sampler``, or all neighbours where that is a
            ``WholePartSampler``.
    """

    batch_size: Count | None = None
    sampler: AnySampler | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def as_published(cls, num_hops: int = 2) -> GlobalBatching:
        """Return that of the LLCG paper: all neighbours of seeds that are drawn uniformly.

        Args:
            num_hops: As many as the data module's ``sampler`` draws.
        """
        check_at_least(1, num_hops=num_hops)
        return cls(sampler=NeighborSampler([-1] * num_hops))


@dataclass(frozen=True)
class BatchSettings:
    """All settings of a data module's batches, checked together.

    Args:
        sampler: Draws training batches. Default: ``NeighborSampler([15, 10])``.
        batch_size: Seeds in a training batch, at most.
        seed: Everything random is drawn from it.
        loading: How batches are made.
        evaluation: How the whole graph is sampled to evaluate a model.
        global_batching: How the whole graph is sampled for corrections.

    Attributes:
        samplers: Those of training batches, corrections and evaluation.
        seed_of_parts: What decides how a graph is cut and dealt: 0 unless a seed was given, so that no cut is made
            anew.
    """

    sampler: AnySampler | None
    batch_size: Count
    seed: Seed | None
    loading: Annotated[Loading, "an object such as Loading(bulk_size=8)"]
    evaluation: Annotated[Evaluation, "an object such as Evaluation(batch_size=4096)"]
    global_batching: Annotated[GlobalBatching, "an object such as GlobalBatching(batch_size=4096)"]
    training_sampler: Sampler = field(init=False)
    correction_sampler: Sampler = field(init=False)
    samplers: tuple[Sampler, Sampler, Sampler] = field(init=False)
    seed_of_parts: int = field(init=False)

    def __post_init__(self) -> None:
        check_fields(self)
        ours = NeighborSampler([15, 10]) if self.sampler is None else self.sampler
        across = NeighborSampler([-1] * ours.num_hops) if isinstance(ours, WholePartSampler) else ours
        given = self.global_batching.sampler
        vars(self).update(training_sampler=ours, correction_sampler=across if given is None else given)
        vars(self).update(samplers=(ours, self.correction_sampler, self.of_evaluation()), seed_of_parts=self.seed or 0)
        if self.loading.sample_on == "device":
            extension("rows on devices").check(ours, given)
        others = {"evaluation": self.evaluation.sampler, "global_batching": given}
        for name, other in others.items():
            if other is not None and other.num_hops != ours.num_hops:
                raise ValueError(
                    f"{name} samples {other.num_hops} hops and sampler {ours.num_hops}, and one model takes batches of "
                    "both: draw as many hops as the model has layers."
                )
        # What decides which events a seed must not see; None where it sees all.
        sight, *sights = (each.sight if isinstance(each, SeesByTime) else None for each in self.samplers)
        for name, other, of_other in zip(others, self.samplers[:0:-1], sights[::-1], strict=True):
            if of_other != sight:
                raise ValueError(
                    f"{name} draws with {other} and training with {ours}: seeds must see the same events "
                    "in both, so give both a TemporalSampler with the same time, seed_time and equal, or none."
                )
        if sight is not None and self.loading.all_labels:
            raise ValueError(
                "Loading(all_labels=True) shows a seed the labels of nodes that are judged with it or after it, and "
                f"{ours} draws by time: leave all_labels out."
            )

    @property
    def evaluates_whole_rows(self) -> bool:
        """Whether an evaluation takes all in-neighbours of a node, whichever seed it is reached from."""
        return self.evaluation.sampler is None and not isinstance(self.training_sampler, SeesByTime)

    @property
    def leaves_types_out(self) -> bool:
        """Whether some hop draws no edge of some type. An evaluation then does so, too."""
        return isinstance(self.training_sampler, NeighborSampler) and self.training_sampler.leaves_types_out

    def of_evaluation(self, more_hops: int = 0) -> Sampler:
        """Return the sampler of the whole graph for evaluation; where it takes whole rows, with so many hops more."""
        ours = self.training_sampler
        if self.evaluation.sampler is not None:
            return self.evaluation.sampler
        if isinstance(ours, SeesByTime):
            return ours.of_evaluation()
        if isinstance(ours, NeighborSampler) and isinstance(ours.num_neighbors, Mapping):  # types may be left out
            whole = {kind: [-1 if n else 0 for n in of] for kind, of in ours.num_neighbors.items()}
            return NeighborSampler({kind: [*of, *of[-1:] * more_hops] for kind, of in whole.items()})
        return NeighborSampler([-1] * (ours.num_hops + more_hops))
