"""What one rank holds and the others do not: it goes into the checkpoint, so that a run resumes exactly.

Weights are equal after a meeting and are saved once, by Lightning. The optimizers' moments, local buffers and
the generators of random numbers differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist import collectives

KEY = "lightning_gnn_dist"
VERSION = 1


@dataclass(frozen=True)
class ReplicaState:
    """Where the run stood when the checkpoint was written, as this rank saw it."""

    round_idx: int
    batches_done: int
    random_state: Mapping[str, Any]
    extra: Mapping[str, Any]


def random_state() -> dict[str, Any]:
    """The state of torch's generators."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Dropout goes on with the numbers it would have drawn."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def add_to_checkpoint(
    checkpoint: dict[str, Any],
    round_idx: int,
    batches_done: int,
    own_buffers: Mapping[str, Tensor],
    extra: Mapping[str, Any],
) -> None:
    """Collective. Only tensors, numbers and plain containers: ``torch.load(weights_only=True)`` must read it."""
    mine = {
        "batches_done": batches_done,
        "optimizer_states": checkpoint["optimizer_states"],
        "buffers": {name: buffer.cpu() for name, buffer in own_buffers.items()},
        "random_state": random_state(),
        "extra": dict(extra),
    }
    ranks = collectives.gather_objects(mine)
    checkpoint[KEY] = {"version": VERSION, "round_idx": round_idx, "ranks": ranks}


def mark_in_round(checkpoint: dict[str, Any]) -> None:
    """Say that the weights are those of one replica, before its meeting. Not collective."""
    rank_zero_warn(
        "This checkpoint is written inside a round, so it holds rank 0's replica and cannot be resumed. Its weights "
        "can be loaded. Checkpoints at the end of an epoch, which is a meeting, can be resumed."
    )
    checkpoint[KEY] = {"version": VERSION, "ranks": None}


def mark_alone(checkpoint: dict[str, Any]) -> None:
    """Say that one rank wrote this after an exception, and where the others stood nobody knows. Not collective."""
    rank_zero_warn(
        "This checkpoint is written after an exception, so it holds rank 0's buffers and cannot be resumed. Its "
        "weights can be loaded. Checkpoints that all ranks write, at the end of a step or later, can be resumed."
    )
    checkpoint[KEY] = {"version": VERSION, "ranks": None, "strategy": "grappa"}


def average_buffers_of(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Put the mean of all ranks' buffers into the checkpoint; those of the module stay as they are. Collective."""
    names = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    for key in ("state_dict", "current_model_state"):  # the second of WeightAveraging
        state = checkpoint.get(key, {})
        means = {name: state[name].clone() for name in names if isinstance(state.get(name), Tensor)}
        collectives.average_(means.values())
        state.update(means)


def take_from_checkpoint(checkpoint: dict[str, Any]) -> ReplicaState:
    """Put this rank's own state in the place of rank 0's, and say where the run stood."""
    saved = checkpoint.get(KEY)
    if saved is None or "strategy" in saved:
        raise ValueError(
            "The checkpoint was not written by a strategy of rounds, so it does not say at which round it "
            "stood. To start from its weights, load them (Module.load_from_checkpoint(path)) and leave ckpt_path out."
        )
    if saved["version"] > VERSION:
        raise ValueError(
            f"The checkpoint's state has version {saved['version']}, and this release reads up to {VERSION}: "
            "upgrade lightning_gnn_dist."
        )
    if saved["ranks"] is None:
        raise ValueError(
            "The checkpoint was written inside a round (after an exception), so it holds one replica and cannot be "
            "resumed. Resume from one written at a meeting, or start from its weights "
            "(Module.load_from_checkpoint(path)) and leave ckpt_path out."
        )
    if len(saved["ranks"]) != collectives.world_size():
        raise ValueError(
            f"The checkpoint was written by {len(saved['ranks'])} ranks, and this fit has "
            f"{collectives.world_size()}: resume with as many, or start from its weights "
            "(Module.load_from_checkpoint(path)) and leave ckpt_path out."
        )
    mine = saved["ranks"][collectives.rank()]
    checkpoint["optimizer_states"] = mine["optimizer_states"]
    checkpoint["state_dict"].update(mine["buffers"])
    return ReplicaState(saved["round_idx"], mine["batches_done"], mine["random_state"], mine["extra"])


def take_of_gradients(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """What a checkpoint of a strategy that exchanges gradients says of this rank; None where it says nothing."""
    saved = checkpoint.get(KEY)
    if saved is None:  # of plain DDP
        return None
    if "strategy" not in saved:
        raise ValueError(
            "The checkpoint was written by a strategy of rounds, whose epochs are rounds and not passes. To start from "
            "its weights, load them (Module.load_from_checkpoint(path)) and leave ckpt_path out."
        )
    if saved["ranks"] is None:
        raise ValueError(
            "The checkpoint was written after an exception, by one rank, so it does not say where the others stood and "
            "cannot be resumed. Resume from an earlier one, or start from its weights "
            "(Module.load_from_checkpoint(path)) and leave ckpt_path out."
        )
    if len(saved["ranks"]) != collectives.world_size():
        rank_zero_warn(
            f"The checkpoint was written by {len(saved['ranks'])} ranks, and this fit has {collectives.world_size()}: "
            "it goes on with other parts, and other draws of dropout."
        )
        return None
    mine: dict[str, Any] = saved["ranks"][collectives.rank()]
    return mine


def forget_moments(optimizers: Iterable[Optimizer]) -> None:
    """Let moments that are not finite begin anew."""
    for tensor in optimizer_tensors(optimizers):
        if not bool(tensor.isfinite().all()):
            tensor.zero_()


def optimizer_tensors(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The state of the optimizers, in the same order on every rank."""
    tensors = []
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            state = optimizer.state.get(parameter, {})
            tensors += [state[name] for name in sorted(state) if isinstance(state[name], Tensor)]
    return tensors
