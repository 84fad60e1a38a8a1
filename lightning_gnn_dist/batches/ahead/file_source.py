"""The source of batches of a graph in files: rows of coming batches are read in the background, near ones at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.disk_rows import DiskRows, FoundRows
from lightning_gnn_dist.batches.ahead.source import AheadSource
from lightning_gnn_dist.batches.assembling import Content, Taken, made_of
from lightning_gnn_dist.batches.batch import LABELS, SampledData
from lightning_gnn_dist.batches.device_stream import DeviceStream
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.pool import gather_joined, gather_rows
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.mapped import MappedRows
from lightning_gnn_dist.sampling.base import OrdersSeeds, Sampler
from lightning_gnn_dist.sampling.turns import Steps, at_once


class DrawnNodes(NamedTuple):
    """Batches that are drawn, without their arrays.

    Attributes:
        samples: What was drawn, for each batch.
        distinct: The nodes of all of them, each once, increasing.
        inverse: Where each node of each batch stands among them.
    """

    samples: list[Sample]
    distinct: Tensor
    inverse: Tensor


class FileSource(AheadSource[DrawnNodes]):
    """Makes the batches that a :class:`GraphSource` would make, and reads wide rows from files, not through maps.

    Args:
        graph: The graph to sample, memory-mapped. Its edges and narrow arrays are read through the maps.
        rows: Its wide rows.
        sampler: Draws the neighbourhoods.
        loading: How batches are made.
        num_ids: Seeds must lie below this number. Default: the number of nodes.
        stream: Brings batches to a device. With None they stay in RAM.
        stays: The type narrower than float32 that a step computes in, if there is one.
    """

    def __init__(
        self,
        graph: Graph,
        rows: DiskRows,
        sampler: Sampler,
        loading: Loading,
        *,
        num_ids: int | None = None,
        stream: DeviceStream | None = None,
        stays: torch.dtype | None = None,
    ) -> None:
        super().__init__(rows.cache, loading, stream, stays)
        self._graph, self._rows, self._sampler = graph, rows, sampler
        self._mapped: list[MappedRows] = []  # of which pages are released
        self.num_ids = graph.num_nodes if num_ids is None else num_ids

    def order(self, seeds: Tensor, seed: int, epoch: int) -> Tensor | None:
        sampler = self._sampler
        return sampler.order(self._graph, seeds, seed, epoch) if isinstance(sampler, OrdersSeeds) else None

    def spare_memory(self) -> None:
        self._mapped = [MappedRows(self._graph.indptr), MappedRows(self._graph.indices)]

    def _draw(self, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[DrawnNodes]:
        samples = self._sampler.sample_bulk(self._graph, seeds, keys)
        for array in self._mapped:
            array.release()
        nodes = torch.cat([sample.nodes for sample in samples])
        return at_once(DrawnNodes(samples, *nodes.unique(return_inverse=True)))

    def _fill(self, bulk: DrawnNodes, coming: Sequence[DrawnNodes]) -> Steps[list[SampledData]]:
        samples = bulk.samples
        with self._rows.making:  # what the cache holds stays until the bulk has it
            found = self._rows.find(bulk.distinct, bulk.inverse, [other.distinct for other in coming])
            at_node = found.places.split([len(sample.nodes) for sample in samples])
            return at_once([self._filled(sample, found, at) for sample, at in zip(samples, at_node, strict=True)])

    def _filled(self, sample: Sample, found: FoundRows, at: Tensor) -> SampledData:
        num_labels = None if self._loading.all_labels else sample.num_sampled_nodes[0]
        nodes, edges = dict[str, Tensor](), dict[str, Tensor]()
        for name, array in self._graph.node_arrays.items():
            upto, pool = num_labels if name == LABELS else None, self._pool_of(name)
            if name in found.held:
                nodes[name] = gather_joined(array[:0], found.held[name], found.read[name], at[:upto], pool)
            else:
                nodes[name] = gather_rows(array, sample.nodes[:upto], pool)
        if sample.edge_ids is not None:
            read = self._rows.edge_rows(sample.edge_ids)
            for name, array in self._graph.edge_arrays.items():
                edges[name] = read[name] if name in read else gather_rows(array, sample.edge_ids, self._pool_of(name))
        return made_of(Content.of_one_type(sample, Taken(nodes), Taken(edges)), widen=self._widen)
