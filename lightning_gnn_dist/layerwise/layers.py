"""One layer of a model, computed for many nodes in batches that keep to a budget of memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import FAConv, GCN2Conv, GCNConv, LGConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.file_rows import FileRows
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.engine.scratch import DIRECT_NODES
from lightning_gnn_dist.graph.convert import SUFFIX
from lightning_gnn_dist.graph.graph import Graph, checked_graph
from lightning_gnn_dist.graph.rows import bytes_per_row
from lightning_gnn_dist.graph.storage.row_file import rows_of
from lightning_gnn_dist.graph.storage.store import map_npy
from lightning_gnn_dist.layerwise.shared_rows import SharedRows
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

Layer = Callable[[Data], Tensor]
Rows = np.ndarray[Any, Any]
OnRows = Callable[[Data, Tensor], object]
COPIES = 3  # a layer's rows, and what it computes from them on the way, take so many times their bytes
BYTES_OF_AN_EDGE = 120  # in the sampler's working memory and in the batch
_PLANNED = 0.6  # share of the budget; windows of files and what an allocator keeps of the last batch come on top
_NORMALISING = (GCNConv, GCN2Conv, FAConv, LGConv)  # PyG's layers that call gcn_norm on the edges they are given


class HasLayers(Protocol):
    """A module whose layers can be called one after the other."""

    def layers(self) -> Sequence[Layer]:
        """Return a function per layer. Each takes a batch of one hop, whose ``x`` has the rows of the layer before.

        It returns a row for each of the first ``batch.batch_size`` nodes; rows behind them are cut off. Beside ``x``,
        the batch has ``x0``, the input rows of its nodes, which are the first layer's ``x``; and as usual
        ``blocks[0]``, ``edge_index``, ``n_id``, and the graph's other arrays. The last layer's rows are the prediction.
        """
        ...


def has_layers(model: object) -> bool:
    """Whether a model has a method ``layers``. An attribute of that name, such as a list of modules, does not count."""
    return callable(getattr(type(model), "layers", None))


def layers_in(model: HasLayers) -> list[Layer]:
    """The layers of a model. Refused where one would normalise by the degrees of a batch of one hop."""
    if not has_layers(model):
        raise TypeError(
            f"module must have a method layers(), got {shown(model)}. Define it: it returns a list of functions of a "
            "batch, one for each layer."
        )
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    known = {conv for gnn in modules if isinstance(gnn, BasicGNN) for conv in gnn.modules()}
    for conv in modules:
        if isinstance(conv, _NORMALISING) and conv.normalize and conv not in known:
            raise ValueError(
                f"module: {type(conv).__name__} normalises by the degrees in its batch, and in a batch of one hop "
                "senders have none. Normalise once, Graph.from_pyg(torch_geometric.transforms.GCNNorm()(data)), and "
                f"call {type(conv).__name__}(..., normalize=False) with batch.edge_weight; or take "
                "torch_geometric.nn.GCN and layers_of."
            )
    return list(model.layers())


@dataclass
class LayerWork:
    """The work of one rank. A subclass decides for which nodes, and where rows of inner layers go.

    Attributes:
        model: A module with a method ``layers``.
        path: The file for the rows of the last layer, which all ranks share, or None to write none.
        budget_bytes: Bytes that a batch may take.
        on_rows: Called with each batch of the last layer and the rows of its seeds.
        dtype: The type of the rows of the layer before, to which ``x`` is converted back: files hold no bfloat16.
        inputs: The graph with the input rows, once layers are computed.
    """

    model: LightningModule
    path: Path | None
    budget_bytes: int
    on_rows: OnRows | None
    dtype: torch.dtype | None = None
    inputs: Graph | None = None

    def layers(self) -> list[Layer]:
        return layers_in(cast(HasLayers, self.model))

    def compute(self, layer: Layer, graph: Graph, nodes: range, on_rows: OnRows | None) -> Iterator[tuple[range, Rows]]:
        """Compute a layer for ``nodes`` of a graph; yield each batch's nodes and their rows."""
        start, bytes_out, dtype, source = nodes.start, bytes_per_row(graph.node_arrays), self.dtype, FileRows(graph)
        inputs, bytes_x0 = self._input_rows(graph)
        while start < nodes.stop:
            stop = end_of_batch(graph, start, nodes.stop, self.budget_bytes, bytes_out, bytes_x0)
            batch = _batch(graph, source, torch.arange(start, stop), dtype, self.model.device, inputs)
            outputs = layer(batch)
            bytes_x0 = bytes_x0 if "x0" in batch else 0  # most layers do not read it
            rows = rows_of(outputs, stop - start, "a layer")
            yield range(start, stop), rows
            if on_rows is not None:
                on_rows(batch, outputs[: stop - start])
            start, bytes_out, self.dtype = stop, rows[:1].nbytes, outputs.dtype
            del batch, outputs, rows  # otherwise two batches would be held while the next is made

    def _input_rows(self, graph: Graph) -> tuple[FileRows | None, int]:
        """Where the rows of ``x0`` are read, and the bytes of one; of the first layer they are ``x``."""
        if self.inputs is None or self.inputs is graph:
            return None, 0
        arrays = {
            name: self.inputs.node_arrays[name] for name in ("x", "x" + SUFFIX) if name in self.inputs.node_arrays
        }
        return FileRows(checked_graph(graph.indptr, graph.indices, arrays, {})), bytes_per_row(arrays)

    def shared_rows(self, path: Path, num_rows: int) -> SharedRows:
        """A file that all ranks write together."""
        return SharedRows(path, num_rows, self.model.device, "a layer")


def with_x(graph: Graph, rows: Path) -> Graph:
    """The graph with other features ``x``: a layer's rows in a file."""
    return with_arrays(graph, {"x": torch.from_numpy(map_npy(rows))})


def with_arrays(graph: Graph, arrays: dict[str, Tensor]) -> Graph:
    """The graph with more node arrays, or others."""
    return checked_graph(graph.indptr, graph.indices, graph.node_arrays | arrays, graph.edge_arrays)


def end_of_batch(graph: Graph, start: int, end: int, budget_bytes: int, bytes_out: int, bytes_x0: int = 0) -> int:
    """The end of the largest batch from ``start`` on that keeps to the budget; at least ``start + 1``."""
    bytes_in = bytes_per_row(graph.node_arrays) + bytes_x0
    per_edge = BYTES_OF_AN_EDGE + bytes_per_row(graph.edge_arrays)
    first = int(graph.indptr[start])

    def cost(stop: int) -> int:
        edges, nodes = int(graph.indptr[stop]) - first, stop - start
        senders = min(edges + nodes, graph.num_nodes)
        of_rows = COPIES * (senders * bytes_in + nodes * bytes_out)
        return of_rows + edges * per_edge + 4 * min(graph.num_nodes, DIRECT_NODES)

    fitting = bisect_right(range(start + 1, end + 1), _PLANNED * budget_bytes, key=cost)
    return start + max(fitting, 1)


def _batch(
    graph: Graph,
    source: FileRows,
    nodes: Tensor,
    dtype: torch.dtype | None,
    device: torch.device,
    inputs: FileRows | None,
) -> SampledData:
    """A batch of one hop: ``nodes`` as seeds, with all their in-neighbours."""
    (sample,) = NeighborSampler([-1]).sample_bulk(graph, [nodes], [BatchKey(0, 0, 0)])
    source.release()
    batch = source.assemble(sample)
    if dtype is not None:
        batch.x = batch.x.to(dtype)
    batch.to(device)  # in place
    if inputs is None:
        batch.x0 = batch.x
    else:
        batch.promise_x0(lambda: inputs.assemble(sample).x.to(device))
    return batch
