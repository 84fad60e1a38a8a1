"""An epoch by each way to make batches, beside the same training on batches made before, and beside PyG's loader."""

from __future__ import annotations

import os
from itertools import cycle, islice
from typing import Any

import torch
from gpu_parts.common import (
    IN_RAM,
    NUM_NEIGHBORS,
    Module,
    Net,
    Scale,
    Training,
    TrimmedNet,
    attached,
    best_places,
    data_of,
    made_graph,
    now,
    on_device,
    peak_since_last,
    seconds_a_batch,
    trainer_on,
)
from gpu_parts.rows import Rows
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from lightning_gnn_dist import Graph, GrappaStrategy, Loading

KEPT = 16  # batches made before
GOAL = ("at most", 1.3)
PYG = "PyG's NeighborLoader"


def measure(rows: Rows, scale: Scale, _: Any) -> None:
    graph = made_graph(scale, scale.epoch_batches)
    ways, least = best_places(), made_before(rows, scale, graph)
    for name, loading in ways.items():
        with rows.guarded(name):
            data = data_of(graph, scale, loading)
            of_loader(rows, scale, name, attached(data), least)
            data.teardown("fit")
    with rows.guarded(PYG):
        of_pyg(rows, scale, graph, least)
    for name, loading in ways.items():
        with rows.guarded(f"Trainer.fit, {name}"):
            under_trainer(rows, scale, name, graph, loading, least)


def made_before(rows: Rows, scale: Scale, graph: Graph) -> float:
    """Seconds of a step on batches that are there."""
    data, training = data_of(graph, scale, IN_RAM), Training(Net(scale))
    batches = list(islice(attached(data), KEPT))
    for batch in batches[:2]:
        training.step(batch)
    seconds = seconds_a_batch(islice(cycle(batches), scale.epoch_batches), training.step, scale.seconds)
    note = f"{1e3 * seconds:.2f} ms a step, {scale.epoch_batches} steps on {len(batches)} batches"
    rows.add("batches made before", seconds * scale.epoch_batches, "s", note=note)
    data.teardown("fit")
    return seconds


def of_loader(rows: Rows, scale: Scale, name: str, loader: Any, least: float) -> None:
    training = Training(Net(scale))
    seconds_a_batch(islice(loader, 4), training.step, scale.seconds)
    tell(rows, scale, name, seconds_a_batch(loader, training.step, scale.seconds), least, GOAL)


def under_trainer(rows: Rows, scale: Scale, name: str, graph: Graph, loading: Loading, least: float) -> None:
    module = Timed(scale)
    trainer = trainer_on(strategy=GrappaStrategy(), max_epochs=2)
    trainer.fit(module, data_of(graph, scale, loading))
    tell(rows, scale, f"Trainer.fit with GrappaStrategy(), {name}", module.seconds / scale.epoch_batches, least, GOAL)


def of_pyg(rows: Rows, scale: Scale, graph: Graph, least: float) -> None:
    if not WITH_PYG_LIB and not WITH_TORCH_SPARSE:
        rows.add(PYG, "left out", note="neither pyg-lib nor torch-sparse is installed")
        return
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    arrays = {name: graph.node_arrays[name] for name in ("x", "y")}
    data = Data(num_nodes=graph.num_nodes, edge_index=torch.stack([graph.indices.long(), receivers]), **arrays)
    workers = min(8, os.cpu_count() or 1)
    options = {"batch_size": scale.batch_size, "shuffle": True, "num_workers": workers, "persistent_workers": True}
    loader = NeighborLoader(data, NUM_NEIGHBORS, graph.node_arrays["train_mask"], is_sorted=True, **options)
    for name, net in ((f"{PYG}, trimmed", TrimmedNet), (PYG, OnEdges)):
        training = Training(net(scale))
        seconds_a_batch(islice(on_device(loader), 4), training.step, scale.seconds)
        seconds = seconds_a_batch(on_device(loader), training.step, scale.seconds)
        tell(rows, scale, f"{name}, {workers} workers", seconds, least)


class Timed(Module):
    """Keeps the seconds of the last epoch."""

    seconds = 0.0

    def on_train_epoch_start(self) -> None:
        self.seconds = -now()

    def on_train_epoch_end(self) -> None:
        self.seconds += now()


class OnEdges(Net):
    """The same model on all edges of the batch in each layer, as a first module of PyG has it."""

    def forward(self, batch: Any) -> torch.Tensor:
        x = batch.x
        for layer, conv in enumerate(self.convs):
            x = conv(x, batch.edge_index)
            x = x if layer == len(self.convs) - 1 else x.relu()
        return x[: batch.batch_size]


def tell(rows: Rows, scale: Scale, name: str, seconds: float, least: float, goal: Any = None) -> None:
    """An epoch in seconds, and as a multiple of that on batches made before."""
    note = f"{1e3 * seconds:.2f} ms a step; {peak_since_last()}"
    rows.add(name, seconds * scale.epoch_batches, "s", note=note)
    rows.add(f"{name}, over batches made before", seconds / least, "times", goal=goal)
