"""What a model says of every node, one layer at a time.

    h_0 = x,   h_l[v] = layer_l(h_(l-1)[v], {h_(l-1)[u] : u -> v}) for all v, before any h_(l+1)

So a layer is computed once for each node. Batches with all neighbours compute the inner layers of a node again for
every batch that it is reached from, and hold all that is reached by as many hops as there are layers.
"""

from __future__ import annotations

import os
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist import collectives
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.row_file import RowFile, make, rows_of
from lightning_gnn_dist.sampling.base import BatchKey
from lightning_gnn_dist.sampling.file_rows import FileRows
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.scratch import DIRECT_NODES

Layer = Callable[[Data], Tensor]
BUDGET_BYTES = 1 << 30
LEAST_BYTES = 16 << 20  # with less, the sampler's table of nodes would leave no room for a batch
_BYTES_OF_AN_EDGE = 120  # in the sampler's working memory and in the batch
_COPIES = 3  # of rows: what a layer reads, and what it makes of that on the way
_PLANNED = 0.75  # of the budget; an allocator holds on to some of what the batch before has freed


class HasLayers(Protocol):
    """A module that can be asked for one layer after the other."""

    def layers(self) -> Sequence[Layer]:
        """Functions of a batch of one hop, whose ``x`` is what the function before returned; the last one's is kept.

        Each returns a row for each of the first ``batch.batch_size`` nodes. Beside ``x`` the batch is an ordinary one:
        ``blocks[0]``, ``edge_index``, ``n_id``, and the graph's other arrays.
        """
        ...


def has_layers(model: LightningModule) -> bool:
    """Whether it is one. An attribute of that name, such as a list of modules, is something else."""
    return callable(getattr(type(model), "layers", None))


def predict_by_layer(
    trainer: Trainer,
    model: LightningModule,
    graph: Graph,
    path: str | Path,
    *,
    budget_bytes: int = BUDGET_BYTES,
    overwrite: bool = False,
    **options: Any,
) -> None:
    """Write the rows of all nodes to one ``.npy``, row ``v`` for node ``v``, shared by all ranks of the trainer.

        class SAGE(pl.LightningModule):
            def layers(self):
                return [lambda batch: self.conv1(batch.x, batch.edge_index).relu(), self.last]

    Args:
        trainer: Starts the ranks, places the model and sets the precision.
        model: Has a method ``layers``, see :class:`HasLayers`.
        graph: All ranks need it, and storage that they share for the file and those of inner layers beside it.
        path: The file. It appears when it is complete.
        budget_bytes: What a batch may take on each rank, beside what the process has anyway. What a layer makes of
            every edge, as attention does, comes on top; so do, where there is no ``/proc``, pages of mapped files. A
            node with more neighbours than the budget allows is a batch of its own.
        overwrite: Replace a file that is there.
        options: Those of ``trainer.predict``: ``ckpt_path``, ``weights_only``.
    """
    path = Path(path)
    _check(trainer, model, path, budget_bytes, overwrite)
    # As a step of Lightning's own loop: ranks are started, the checkpoint is loaded, and the precision holds.
    model.predict_step = _Work(model, graph, path, budget_bytes).step  # type: ignore[method-assign]
    try:
        trainer.predict(model, dataloaders=_Once(), return_predictions=False, **options)
    finally:
        del model.predict_step


class _Once:
    """A loader of one batch: Lightning asks for one, and the work is a step's."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


@dataclass
class _Work:
    """Of one rank. All of them meet after each layer."""

    model: LightningModule
    graph: Graph
    path: Path
    budget_bytes: int
    dtype: torch.dtype | None = None  # of a layer's rows: in a file, bfloat16 is float32

    def step(self, batch: Tensor) -> Tensor:
        """In the place of the module's own."""
        layers = list(cast(HasLayers, self.model).layers())
        num_nodes, num_ranks = self.graph.num_nodes, collectives.world_size()
        if num_nodes < num_ranks:
            raise ValueError(f"{num_nodes} nodes are too few for {num_ranks} ranks to share.")
        rank_zero_info(f"{len(layers)} layers, one after the other, for {num_nodes:,} nodes.")
        token = self._agreed_token()
        drafts = [self.path.parent / f".{self.path.name}.{token:x}.{place}" for place in range(len(layers))]
        try:
            for place, layer in enumerate(layers):
                graph = _with_x(self.graph, drafts[place - 1]) if place else self.graph
                self._write_layer(layer, graph, drafts[place])
                self._meet()  # the layer is complete
            if collectives.rank() == 0:
                os.replace(drafts[-1], self.path)
            self._meet()  # none looks for the file before it is there
        finally:
            if collectives.rank() == 0:
                for draft in drafts:
                    draft.unlink(missing_ok=True)
        return batch

    def _write_layer(self, layer: Layer, graph: Graph, draft: Path) -> None:
        """This rank's share of the nodes."""
        rank, num_ranks = collectives.rank(), collectives.world_size()
        start, end = graph.num_nodes * rank // num_ranks, graph.num_nodes * (rank + 1) // num_ranks
        file, bytes_out, dtype, source = None, _bytes_of_row(graph), self.dtype, FileRows(graph)
        while start < end:
            stop = _end_of_batch(graph, start, end, self.budget_bytes, bytes_out)
            outputs = layer(_batch(graph, source, torch.arange(start, stop), dtype).to(self.model.device))
            rows = rows_of(outputs, stop - start, "a layer")
            file = self._open(draft, rows) if file is None else file
            file.write(np.arange(start, stop), rows)
            start, bytes_out, self.dtype = stop, rows[:1].nbytes, outputs.dtype
        assert file is not None
        file.close()

    def _open(self, draft: Path, rows: np.ndarray[Any, Any]) -> RowFile:
        """Rank 0 makes the file; all open it. Each has its first rows now."""
        if collectives.rank() == 0:
            make(draft, self.graph.num_nodes, rows)
        self._meet()
        if not draft.exists():
            raise FileNotFoundError(
                f"Rank {collectives.rank()} does not see {draft}, which rank 0 has made: write to storage that all "
                "hosts share."
            )
        return RowFile(draft, "a layer")

    def _agreed_token(self) -> int:
        token = torch.tensor([uuid.uuid4().int >> 66], device=self.model.device)
        collectives.broadcast_([token])
        return int(token)

    def _meet(self) -> None:
        collectives.gather_rows(torch.zeros(1, dtype=torch.int64, device=self.model.device)).sum().item()


def _batch(graph: Graph, rows: FileRows, nodes: Tensor, dtype: torch.dtype | None) -> Data:
    """These nodes with all that send to them."""
    (sample,) = NeighborSampler([-1]).sample_bulk(graph, [nodes], [BatchKey(0, 0, 0)])
    rows.release()
    batch = rows.assemble(sample)
    if dtype is not None:
        batch.x = batch.x.to(dtype)
    return batch


def _with_x(graph: Graph, rows: Path) -> Graph:
    """The graph with other features: what a layer said of its nodes."""
    x = torch.from_numpy(np.load(rows, mmap_mode="c"))
    return Graph(graph.indptr, graph.indices, graph.node_arrays | {"x": x}, graph.edge_arrays, fingerprint="")


def _end_of_batch(graph: Graph, start: int, end: int, budget_bytes: int, bytes_out: int) -> int:
    """The node after the last one that can be computed together with ``start`` within the budget."""
    bytes_in = _bytes_of_row(graph)
    first = int(graph.indptr[start])

    def cost(stop: int) -> int:
        edges, nodes = int(graph.indptr[stop]) - first, stop - start
        senders = min(edges + nodes, graph.num_nodes)
        of_rows = _COPIES * (senders * bytes_in + nodes * bytes_out)
        return of_rows + edges * _bytes_of_edge(graph) + 4 * min(graph.num_nodes, DIRECT_NODES)

    fitting = bisect_right(range(start + 1, end + 1), _PLANNED * budget_bytes, key=cost)
    return start + max(fitting, 1)


def _bytes_of_row(graph: Graph) -> int:
    return sum(array[:1].numel() * array.element_size() for array in graph.node_arrays.values())


def _bytes_of_edge(graph: Graph) -> int:
    arrays = graph.edge_arrays.values()
    return _BYTES_OF_AN_EDGE + sum(array[:1].numel() * array.element_size() for array in arrays)


def _check(trainer: Trainer, model: LightningModule, path: Path, budget_bytes: int, overwrite: bool) -> None:
    if not has_layers(model):
        raise TypeError(f"{type(model).__name__} has no method layers() that returns one function for each layer.")
    if path.suffix != ".npy":
        raise ValueError(f"Predictions are written as .npy, and {str(path)!r} ends otherwise.")
    if budget_bytes < LEAST_BYTES:
        raise ValueError(f"budget_bytes must be at least 16 megabytes, 16 << 20, got {budget_bytes!r}.")
    if isinstance(trainer.limit_predict_batches, int) or trainer.limit_predict_batches != 1.0:
        raise ValueError(
            f"limit_predict_batches={trainer.limit_predict_batches!r} would leave rows without a prediction: all nodes "
            "are written. Leave the limit out."
        )
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already. Choose another path, or overwrite=True.")
