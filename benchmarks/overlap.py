"""Steps whose gradients travel in 8 bits during the backward pass, and after it, in turns in one run.

    RATE=200mbit sudo -E benchmarks/two_hosts.sh benchmarks/overlap.py --steps 12

Two hosts are network namespaces; without RATE their cable is as fast as the machine. A model of 6.3 million weights,
six layers of 1024, takes batches of 512 rows. Prints the median of the seconds of a step, and the mean, over pairs of
steps that follow each other, of the ratio of the two.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gnn_dist.extensions.rounded.reducers import RoundedGradients


class SentAfter(RoundedGradients):
    """Sends nothing before the last bucket has its gradients."""

    held: list[Any]

    def _begun(self, bucket: Any) -> Any:
        submit, self.held = self._thread.submit, [] if bucket.index() == 0 else self.held
        self._thread.submit = self.held.append  # type: ignore[method-assign,assignment]
        future = super()._begun(bucket)
        self._thread.submit = submit  # type: ignore[method-assign]
        for work in self.held if bucket.is_last() else ():
            submit(work)
        return future


WAYS = {"after": SentAfter, "during": RoundedGradients}


def seconds_of(model: nn.Module, rows: Tensor, gradients: RoundedGradients | None, step: int) -> float:
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    if gradients is not None:
        gradients.begin(step)
    model(rows).square().mean().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--bits", type=int, choices=[8, 16], default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [(nn.Linear(options.width, options.width), nn.ReLU()) for _ in range(options.layers)]
    model = nn.Sequential(*(each for pair in layers for each in pair))
    rows = torch.randn(options.rows, options.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {"alone": model} | {name: DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=4) for name in WAYS}
    ways = {name: make(models[name], [*models[name].parameters()], options.bits) for name, make in WAYS.items()}
    found: dict[str, list[float]] = {"alone": [], "after": [], "during": []}
    for step in range(options.steps + 2):
        for name, seconds in found.items():
            seconds.append(seconds_of(models[name], rows, ways.get(name), step))
    if dist.get_rank() == 0:
        ratios = [during / after for during, after in zip(found["during"][2:], found["after"][2:], strict=True)]
        print(f"{sum(each.numel() for each in model.parameters()) / 1e6:.1f} M weights, {options.bits} bits")
        for name, seconds in found.items():
            print(f"{name}: {statistics.median(seconds[2:]):.3f} s")
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        print(f"during / after: {statistics.mean(ratios):.2f} (standard error {error:.2f})")
    for each in ways.values():
        each.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
