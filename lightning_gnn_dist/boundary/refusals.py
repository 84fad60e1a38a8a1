"""What a boundary does not go with: refused when a data module is made, or before a fit starts, on all ranks alike."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.checks import brief, shown
from lightning_gnn_dist.joint import TrainsReplicasApart, WeighsRanks
from lightning_gnn_dist.layers.norms import norm_of_batch
from lightning_gnn_dist.layers.through_layers import has_layers
from lightning_gnn_dist.sampling.whole import WholePartSampler


def check_whole_part(sampler: object) -> None:
    """Refuse a sampler that draws some of the part."""
    if not isinstance(sampler, WholePartSampler):
        raise ValueError(
            "boundary=Exchange() exchanges the rows of whole parts, so it takes sampler=WholePartSampler(num_hops), "
            f"with a hop for each layer of the model, got {sampler}."
        )


def check_hops(boundary: Boundary, hops: object, residents: Tensor, num_nodes: int) -> None:
    """Refuse what is no list of outside nodes, as ``around`` of a boundary returns one."""
    name = f"{type(boundary).__name__}.around()"
    if not isinstance(hops, list | tuple) or not all(map(_is_vector_of_ids, hops)):
        got = f"a list of {', '.join(map(shown, hops))}" if isinstance(hops, list | tuple) else shown(hops)
        raise TypeError(f"{name} must return a list of vectors of int64, the ids of each hop, got {got}.")
    for number, hop in enumerate(hops, 1):
        if hop.numel() and not 0 <= int(hop.min()) <= int(hop.max()) < num_nodes:
            raise ValueError(
                f"{name} must return ids of the {num_nodes:,} nodes of the graph, and those of its hop {number} go "
                f"from {int(hop.min())} to {int(hop.max())}."
            )
    nodes = torch.cat([residents, *hops]).sort().values if hops else residents[:0]
    if (again := nodes[1:][nodes[1:] == nodes[:-1]]).numel():
        raise ValueError(
            f"{name} must return each outside node once, in the first hop that reaches it, and no node of the part, "
            f"got node {int(again[0])} again."
        )


def _is_vector_of_ids(hop: object) -> bool:
    return isinstance(hop, Tensor) and hop.dim() == 1 and hop.dtype == torch.int64


def check_in_fit(boundary: Boundary, trainer: Trainer) -> None:
    """Refuse a strategy, a precision or a module with which several ranks cannot treat a boundary so."""
    if boundary.exchanges:
        check_exchange(trainer, trainer.lightning_module)
    if boundary.keeps_rows:
        check_history(trainer, trainer.lightning_module)
    if boundary.seed_hops:
        _check_learns_apart(boundary, trainer)


def check_exchange(trainer: Trainer, module: LightningModule) -> None:
    """Refuse a strategy, a precision or a module with which rows cannot be exchanged."""
    if (found := against_exchange(trainer, module)) is not None:
        raise ValueError("boundary=Exchange() computes the layers of all ranks together, in every step. " + found)


def against_exchange(trainer: Trainer, module: LightningModule) -> str | None:
    """Return why rows cannot be exchanged in a fit, and what to do; None where they can."""
    strategy = trainer.strategy
    name = type(strategy).__name__
    conflicts = [
        (
            isinstance(strategy, TrainsReplicasApart),
            f"{name} does not exchange gradients at every step: use GrappaStrategy() or DDP, or for this strategy "
            "boundary=Halo().",
        ),
        (not isinstance(strategy, DDPStrategy), f"{name} is no strategy for it: use GrappaStrategy() or DDP."),
        (
            isinstance(strategy, WeighsRanks) and strategy.weights == "uniform",
            'weights="uniform" counts ranks, whatever their seeds: leave it out.',
        ),
        (
            trainer.precision == "16-mixed",
            'precision="16-mixed" skips steps on single ranks: use "bf16-mixed" or "32-true".',
        ),
        (
            trainer.accumulate_grad_batches != 1,
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} has nothing to add up: a pass is one batch, of "
            "all training nodes. Leave it out.",
        ),
        *_of_module(module),
    ]
    return next((reason for applies, reason in conflicts if applies), None)


def check_history(trainer: Trainer, module: LightningModule) -> None:
    """Refuse a strategy or a module with which rows of the last meeting cannot be known."""
    strategy = trainer.strategy
    conflicts = [
        (
            not isinstance(strategy, TrainsReplicasApart),
            f"{type(strategy).__name__} has no meetings: use LocalSGDStrategy(), LLCGStrategy() or TMAStrategy(), or "
            "with this strategy boundary=Exchange() or Halo().",
        ),
        *_of_module(module),
    ]
    for applies, reason in conflicts:
        if applies:
            raise ValueError("boundary=History() takes rows of inner layers that ranks compute at meetings. " + reason)


def _of_module(module: LightningModule) -> list[tuple[bool, str]]:
    norm = norm_of_batch(module)
    return [
        (
            not has_layers(module),
            f"{type(module).__name__} does not say what its layers are: define layers(), and let forward() return "
            "through_layers(self, batch). For one of PyG's models, layers() returns layers_of(self.gnn). "
            "Any module trains with boundary=Halo().",
        ),
        (
            norm is not None,
            f"{norm} normalises by the rows of all nodes at once, and a rank has its own: use torch.nn.LayerNorm (in "
            'PyG\'s models norm="LayerNorm", norm_kwargs={"mode": "node"}), or boundary=Halo().',
        ),
    ]


def check_seed_hops(boundary: Boundary, *, is_typed: bool = False, of_edges: bool = False) -> None:
    """Refuse seeds of other ranks where there are several types of nodes, or where seeds are edges."""
    if boundary.seed_hops and (is_typed or of_edges):
        what = "graphs without types" if is_typed else "nodes as seeds, not for edges"
        raise ValueError(f"boundary={brief(boundary)} is for {what}: leave seed_hops out.")


def _check_learns_apart(boundary: Boundary, trainer: Trainer) -> None:
    """Refuse seeds of other ranks where the gradients of all ranks' seeds are exchanged at every step."""
    if not isinstance(trainer.strategy, TrainsReplicasApart):
        raise ValueError(
            f"boundary={brief(boundary)} lets ranks learn from each other's training nodes, as replicas drift apart. "
            f"With {type(trainer.strategy).__name__} they do not, and such nodes would count several times: leave "
            "seed_hops out, or use LocalSGDStrategy(), TMAStrategy() or LLCGStrategy()."
        )
