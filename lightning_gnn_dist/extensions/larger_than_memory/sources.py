"""What makes the batches of a graph whose rows lie elsewhere than in RAM: in files, or on the device that trains."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, bytes_of, device_of_batch
from lightning_gnn_dist.batches.pool import gather_rows
from lightning_gnn_dist.batches.source import Finish, GraphSource, stream_to
from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.extensions.larger_than_memory.device_sampler import KINDS, draws_anywhere
from lightning_gnn_dist.extensions.larger_than_memory.files import DiskRows, FileSource, check_rows_in_files
from lightning_gnn_dist.extensions.larger_than_memory.placement import Place, Placement, release
from lightning_gnn_dist.extensions.larger_than_memory.rows_on_device import Crossing
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.homes.run import Host
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.whole import WholePartSampler

_OF_CACHE = 8  # an evaluation takes half of what is free at most; the rest is for rows read ahead, and pages of edges


class RowsInFiles:
    """Reads rows from a graph's files ahead, not through maps, whose pages would drive out others that are needed.

    Args:
        cache_bytes: Memory for rows that are needed again.
        spares: Whether memory is short: then no more is read ahead than the cache has, for one batch at a time.
    """

    def __init__(self, cache_bytes: int, *, spares: bool = False) -> None:
        self._cache_bytes, self._spares = cache_bytes, spares
        self.rows: DiskRows | None = None

    @classmethod
    def of(cls, settings: BatchSettings, graph: Graph) -> Self:
        """Return what ``Loading(cache_bytes=...)`` asks for; refuse it where there is nothing to read ahead."""
        cache_bytes = settings.loading.cache_bytes
        assert cache_bytes is not None
        _check_reads_ahead(settings)
        check_rows_in_files(graph, cache_bytes)
        return cls(cache_bytes)

    @classmethod
    def beyond_memory(cls, graph: Graph, host: Host) -> Self | None:
        """Return what reads the rows of an evaluation where a host has no room for the graph; None if it is in RAM."""
        made = cls(host.free // host.ranks // _OF_CACHE, spares=True)
        made.rows = DiskRows.of(graph, made._cache_bytes)
        if made.rows is None:
            return None
        rank_zero_info(
            f"The graph has {in_bytes(graph.num_bytes)}, and {in_bytes(host.free)} are free: an "
            f"evaluation reads rows from its files ahead, and {in_bytes(made._cache_bytes)} hold those that come "
            "again, as with Loading(cache_bytes=...)."
        )
        return made

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"rows": None}

    @property
    def figures(self) -> dict[str, float]:
        return {} if self.rows is None else self.rows.figures

    def source(self, home: LocalGraph, graph: Graph, sampler: Sampler, finish: Finish | None) -> FileSource | None:
        """Return the source of batches of the whole graph; None of a part, and if the cache would hold all rows."""
        if finish is not None:
            return None
        if self.rows is None:
            self.rows = DiskRows.of(home.graph, self._cache_bytes)
        if self.rows is None or not self.rows.are_rows_of(graph):
            return None
        loading, stream = home.running.settings.loading, stream_to(home.running.device)
        if self._spares:
            loading = replace(loading, ahead_bytes=min(loading.ahead_bytes, self.rows.cache.num_bytes))
        source = FileSource(graph, self.rows, sampler, loading, stream=stream, widen=home.running.widen)
        source.is_short = self._spares
        return source

    def close(self, graph: Graph) -> None:
        """Close the files."""
        if self.rows is not None:
            self.rows.close()
        self.rows = None


def _check_reads_ahead(settings: BatchSettings) -> None:
    loading = settings.loading
    if loading.sample_on != "cpu":
        raise ValueError(
            f"Loading(cache_bytes={loading.cache_bytes}) makes batches in RAM, and sample_on is "
            f"{loading.sample_on!r}: leave one of them out."
        )
    if WholePartSampler in (type(settings.training_sampler), type(settings.global_batching.sampler)):
        raise ValueError(
            f"Loading(cache_bytes={loading.cache_bytes}) holds rows that coming batches need, and a "
            "WholePartSampler has one batch of all rows: draw with a NeighborSampler, or leave cache_bytes out."
        )


class RowsOnDevices:
    """Lets as much of a graph lie on the device that trains as there is room for, or all of it.

    Attributes:
        crossing: Counts what crosses the bus.
    """

    def __init__(self) -> None:
        self.crossing = Crossing()

    @classmethod
    def of(cls, settings: BatchSettings, graph: Graph) -> Self:
        """Return what ``Loading(sample_on="auto")`` or ``"device"`` asks for."""
        return cls()

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log."""
        return self.crossing.figures

    @staticmethod
    def check(*samplers: Sampler | None) -> None:
        """Refuse samplers that cannot draw on a device where they have to. None is skipped."""
        for sampler in samplers:
            if sampler is not None and not draws_anywhere(sampler):
                raise ValueError(
                    f'sample_on="device" needs a sampler that draws there ({KINDS}), got {sampler!r}: choose one, or '
                    'sample_on="auto".'
                )

    def source(self, home: LocalGraph, graph: Graph, sampler: Sampler, finish: Finish | None) -> GraphSource:
        """Return the source of batches of a part or of the whole graph."""
        settings, loading = home.running.settings, home.running.settings.loading
        # The part takes device memory first, though it may be loaded later; it is no larger than the whole graph.
        is_fit, samplers = home.running.stage == TrainerFn.FITTING, settings.samplers
        waits = graph is home.graph and is_fit and home.is_cut and not isinstance(samplers[0], WholePartSampler)
        placement = Placement(
            home.running.device,
            loading.sample_on,
            loading.device_bytes,
            samplers=samplers,
            batch_size=settings.batch_size,
            expected_bytes=graph.num_bytes if waits else 0,
            crossing=self.crossing,
        )
        how = home.running.options_of_sources
        return PlacedSource(graph, sampler, placement=placement, finish=finish, **how)

    def close(self, graph: Graph) -> None:
        """Drop what of the graph lies on devices, and count anew."""
        release(graph)
        self.crossing = Crossing()


class PlacedSource(GraphSource):
    """Makes the batches that a :class:`GraphSource` would make, where a placement says.

    Args:
        placement: Decides at the first batch where the graph is sampled, by which sampler, and where its rows lie,
            until the source is closed.
    """

    is_short = True  # of memory: that of a device, where full neighbourhoods are large

    def __init__(self, graph: Graph, sampler: Sampler, *, placement: Placement, **options: Any) -> None:
        super().__init__(graph, sampler, **options)
        self._placement, self._lock = placement, threading.Lock()
        self._place: Place | None = None

    def close(self) -> None:
        super().close()
        self._place = None

    def _where(self) -> tuple[Graph, Sampler]:
        with self._lock:  # several threads ask for the first batches
            if self._place is None:
                self._place = self._placement.of(self._graph, self._sampler)
            return self._place.graph, self._place.sampler

    def _assembled(self, graph: Graph, samples: Sequence[Sample]) -> list[SampledData]:
        rows = None if self._place is None else self._place.rows
        if rows is None or any(sample.is_constant for sample in samples):
            batches = super()._assembled(graph, samples)
            if self._stream is not None:
                here = [batch for batch in batches if device_of_batch(batch).type == "cpu"]
                self._placement.crossing.add(sum(map(bytes_of, here)))
            return batches
        how: Any = {"widen": self._widen, "all_labels": self._all_labels}
        return rows.batches(graph, samples, self._gather, **how)

    def _gather(self, kind: Any, name: str, array: Tensor, rows: Tensor) -> Tensor:
        return gather_rows(array, rows, self._pool_of(f"{kind} {name}"))
