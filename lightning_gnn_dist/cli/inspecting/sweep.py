"""What ``inspect --sweep`` prints: memory, reads and seconds of a sweep through all chunks, by a probe of this machine.

seconds of a sweep = first chunks + turns * the longer of (steps of a turn, chunks of the next one)
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist.boundary.boundary import Isolated
from lightning_gnn_dist.checks import brief, in_bytes
from lightning_gnn_dist.cli.inspecting.columns import in_columns
from lightning_gnn_dist.cli.inspecting.memory import settings_of
from lightning_gnn_dist.data.datamodule import PartitionedDataModule
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.graph_report import labels_of
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.homes.memory import Needs
from lightning_gnn_dist.homes.plan import PartPlan
from lightning_gnn_dist.homes.residency import Holding, Sweep
from lightning_gnn_dist.layers.budget import Host
from lightning_gnn_dist.layers.through_layers import through_layers
from lightning_gnn_dist.partition.saved_chunks import Chunks, SavedChunks

_STEPS, _WARM = 24, 8  # that are timed, and before them
_MOST_CLASSES = 1 << 14


class Machine(NamedTuple):
    """What was measured here.

    Attributes:
        rate: Bytes of chunks that are read in a second, and put together.
        step: Seconds of a step.
    """

    rate: float
    step: float


class _Layers(nn.Module):
    """GraphSAGE, layer by layer."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(before, behind) for before, behind in pairwise(widths))

    def layers(self) -> list[Any]:
        return [lambda batch, conv=conv: self._rows(conv, batch) for conv in self.convs]

    def _rows(self, conv: nn.Module, batch: Any) -> Tensor:
        (block,) = batch.blocks
        rows: Tensor = conv((batch.x, batch.x[: block.num_dst]), block.adj)
        return rows.relu()


def cost_of_sweep(graph: Graph, options: argparse.Namespace) -> str:
    """Return what a sweep costs on one host, and on more of them."""
    _check(graph, options)
    plan = _plan(graph, options.sweep)
    here, needs = Host.here(1), Needs.of_plan(plan, 1, settings_of(options), is_cut=True)
    machine = _measured(graph, plan, options)
    model = f"GraphSAGE with {options.layers} layers of width {options.width}"
    return "\n".join(
        [
            f"A sweep of {brief(plan.residency)}, a rank on each host, by what was measured here: "
            f"{in_bytes(machine.rate)} of chunks a second, and {machine.step * 1e3:.0f} ms a step of {model}, batches "
            f"of {options.batch_size}:",
            *_table(graph, plan, machine, options),
            f"It takes about {needs.told(1)}; {in_bytes(here.free)} are left here.",
            f"A sweep reads {in_bytes(graph.num_bytes)} and writes nothing: a TB is read in "
            f"{1e12 / graph.num_bytes:,.0f} sweeps.",
            _verdict(graph, plan, machine, options),
        ]
    )


def _check(graph: Graph, options: argparse.Namespace) -> None:
    if Chunks.of(graph) is None:
        raise ValueError(
            f"--sweep is for a graph in the order of chunks, and {options.graph} is not: write one with "
            "lightning-gnn-dist reorder."
        )
    if have_names(graph.types) or "x" not in graph.node_arrays or not len(graph.split("train")):
        raise ValueError(
            f"--sweep trains a model on x around training nodes, and {options.graph} has types, no x, or no training "
            "nodes: leave it out."
        )
    if len(options.fanout) != options.layers:
        raise ValueError(f"--layers {options.layers} needs a --fanout of as many numbers, got {options.fanout}.")


def _plan(graph: Graph, num_bytes: int) -> PartPlan:
    return PartPlan(graph, SavedChunks(), Holding(Sweep(bytes=num_bytes)), Isolated(), None, 0)


def _measured(graph: Graph, plan: PartPlan, options: argparse.Namespace) -> Machine:
    """Read the first chunks from the disk, not from the system's cache, and train on them for some steps."""
    assert graph.path is not None
    for file in graph.path.rglob("*.npy") if hasattr(os, "posix_fadvise") else ():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    reader = plan.reader(0, 1, plan.boundary, None)
    part = [reader.read(0) for _ in range(2)][-1]  # the first time compiles loops
    return Machine(part.bytes_read / part.seconds, _seconds_of_step(graph, options))


def _seconds_of_step(graph: Graph, options: argparse.Namespace) -> float:
    settings = settings_of(options)
    how: Any = {"sampler": settings.sampler, "batch_size": settings.batch_size, "loading": settings.loading}
    data = PartitionedDataModule(graph, holding=Holding(Sweep(bytes=options.sweep)), coverage=None, **how)
    try:
        data.setup("fit")
        labels = labels_of(graph)
        last = options.width if labels is None else min(max(1, int(labels.max()) + 1), _MOST_CLASSES)
        model = _Layers([graph.node_arrays["x"].shape[1], *[options.width] * (options.layers - 1), last])
        optimizer = torch.optim.Adam(model.parameters())
        started = count = 0.0
        for number, batch in enumerate(data.train_dataloader()):
            if number == _WARM:
                started = time.perf_counter()
            optimizer.zero_grad()
            through_layers(model, batch).square().mean().backward()
            optimizer.step()
            count = number + 1 - _WARM
            if count == _STEPS:
                break
        if count <= 0:
            raise ValueError(f"--sweep times {_WARM} steps and more, and a sweep has fewer: take smaller --batch-size.")
        return (time.perf_counter() - started) / count
    finally:
        data.teardown("fit")


class _Costs(NamedTuple):
    """What a sweep costs each of some hosts.

    Attributes:
        turns: How often it holds other chunks.
        steps: Seconds of steps.
        reads: Seconds of reads, 0 if chunks stay.
        first: Those of the first chunks, for which training waits.
    """

    turns: int
    steps: float
    reads: float
    first: float

    @property
    def seconds(self) -> float:
        return self.first + max(self.steps, self.reads)


def _costs(graph: Graph, plan: PartPlan, machine: Machine, hosts: int, options: argparse.Namespace) -> _Costs:
    turns, seeds = plan.residency.turns(hosts), len(graph.split("train"))
    steps = turns * -(-seeds // (turns * hosts * options.batch_size)) * machine.step
    reads = graph.num_bytes / hosts / machine.rate if turns > 1 else 0.0
    return _Costs(turns, steps, reads, reads / turns)


def _hosts(plan: PartPlan) -> list[int]:
    """One host, twice as many, and so on, until chunks stay where they are."""
    found, most = [1], plan.residency.num_chunks(1)
    while plan.residency.turns(found[-1]) > 1 and 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return found


def _table(graph: Graph, plan: PartPlan, machine: Machine, options: argparse.Namespace) -> list[str]:
    rows: list[tuple[str, ...]] = [("hosts", "turns", "read by each", "steps", "reads", "a sweep")]
    for hosts in _hosts(plan):
        costs = _costs(graph, plan, machine, hosts, options)
        read = in_bytes(graph.num_bytes / hosts) if costs.reads else "nothing"
        seconds = (f"{each:,.1f} s" for each in (costs.steps, costs.reads, costs.seconds))
        rows.append((str(hosts), str(costs.turns), read, *seconds))
    return in_columns(rows)


def _verdict(graph: Graph, plan: PartPlan, machine: Machine, options: argparse.Namespace) -> str:
    costs, enough = _costs(graph, plan, machine, 1, options), _hosts(plan)[-1]
    if costs.turns == 1:
        return "All chunks fit into so many bytes: nothing is read anew, and Holding() does the same."
    stays = f"with {enough} hosts chunks stay in memory, and nothing is read"
    if costs.reads > costs.steps:
        return (
            f"The disk decides: reads take {costs.reads / costs.steps:.1f} times the seconds of steps. More hosts "
            f"divide both, and {stays}."
        )
    return (
        f"Steps decide, and hide reads, which take {costs.reads / costs.steps:.0%} of their seconds: more hosts divide "
        f"the steps, and {stays}."
    )
