"""``torch.compile`` on a model that takes blocks: does it run, is it right, what does it gain?"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from gpu_parts.common import (
    IN_RAM,
    Net,
    Scale,
    Training,
    attached,
    data_of,
    made_graph,
    now,
    seconds_a_batch,
)
from gpu_parts.rows import Rows
from torch._dynamo.utils import counters

BATCHES = 8  # of different sizes


def measure(rows: Rows, scale: Scale, _: Any) -> None:
    data = data_of(made_graph(scale, BATCHES), scale, IN_RAM)
    batches = list(islice(attached(data), BATCHES))
    for form in ("edge_index", "adj"):  # the second has sparse matrices, which end a graph
        with rows.guarded(f"block.{form}"):
            plain = Training(Net(scale, form))
            seconds = seconds_of_step(plain, batches, scale)
            rows.add(f"block.{form}, not compiled", 1e3 * seconds, "ms a step")
            for backend in ("eager", "inductor"):
                with rows.guarded(f"block.{form}, {backend}"):
                    of_backend(rows, scale, f"block.{form}, {backend}", form, backend, batches)


def of_backend(rows: Rows, scale: Scale, name: str, form: str, backend: str, batches: list[Any]) -> None:
    torch._dynamo.reset()
    counters.clear()
    plain = Training(Net(scale, form))
    compiled = Training(torch.compile(Net(scale, form), dynamic=True, backend=backend))
    start = now()
    losses = [float(compiled.step(batch)) for batch in batches]
    rows.add(f"{name}: first pass", now() - start, "s", note=f"{len(batches)} batches, compiled on the way")
    expected = [float(plain.step(batch)) for batch in batches]
    apart = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    rows.add(f"{name}: losses apart", apart, note=f"of {expected[-1]:.3f}, over {len(batches)} steps")
    breaks, graphs = counters["graph_break"], counters["stats"]["unique_graphs"]
    why = " / ".join(reason.splitlines()[0][:80] for reason, _ in breaks.most_common(3))
    rows.add(f"{name}: graph breaks", breaks.total(), note=f"{graphs} graphs compiled; {why or 'none'}")
    rows.add(name, 1e3 * seconds_of_step(compiled, batches, scale), "ms a step")


def seconds_of_step(training: Training, batches: list[Any], scale: Scale) -> float:
    seconds_a_batch(batches, training.step, scale.seconds)
    return min(seconds_a_batch(batches, training.step, scale.seconds) for _ in range(scale.repeats))
