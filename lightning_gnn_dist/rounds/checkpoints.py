"""The state that differs from rank to rank: a checkpoint holds each rank's, so that a run resumes exactly.

Weights are equal after a meeting and are saved once, by Lightning. The optimizers' moments, local buffers and
the generators of random numbers differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_gnn_dist.wire import collectives

KEY = "lightning_gnn_dist"
VERSION = 1
TAKES_FIRST = (
    "Ranks compute on processors of different kinds, whose results differ in the last digits. Where replicas do after "
    "a meeting, all take rank 0's, which moves the model once more."
)
_OF_RANK = {"batches_done": int, "optimizer_states": list, "buffers": dict, "random_state": dict, "extra": dict}
_ROUNDING = 1e-3  # of a tensor's largest number: more than many float32 steps on two processors differ by
_OUT = (
    "Resume from another checkpoint, or start from its weights (Module.load_from_checkpoint(path)) and leave ckpt_path "
    "out."
)

_ROWS_OF_RANKS = (
    "The checkpoint has moments of rows of which each rank has its own, which rounds do not train any more: start from "
    "its weights (Module.load_from_checkpoint(path)) and leave ckpt_path out."
)


@dataclass(frozen=True)
class Resumed:
    """This rank's state in a checkpoint, and the round and batch where the run stood."""

    random_state: Mapping[str, Any]
    extra: dict[str, Any]
    round_idx: int = 0
    batches_done: int = 0


def check_shapes(module: nn.Module) -> None:
    """Refuse lazy layers: their weights are drawn at the first batch, on each rank by itself."""
    lazy = [name for name, tensor in chain(module.named_parameters(), module.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{lazy[0]} has no shape yet (a lazy layer, as GraphSAGE(-1, ...) makes), so that each rank would draw "
            "other weights at its first batch: give the number of features in the place of -1, or run a batch through "
            "the model before the fit."
        )


def random_state() -> dict[str, Any]:
    """Return the state of torch's generators on the CPU and on the current GPU."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore torch's generators, so that dropout draws what it would have drawn."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def add_to_checkpoint(checkpoint: dict[str, Any], of_run: Mapping[str, Any], of_rank: Mapping[str, Any]) -> None:
    """Add all ranks' states, on rank 0. Collective.

    They may hold only what ``torch.load(weights_only=True)`` reads.
    """
    ranks = collectives.gather_objects({"random_state": random_state(), **of_rank})
    checkpoint[KEY] = {"version": VERSION, "ranks": ranks, **of_run}


def mark_alone(checkpoint: dict[str, Any], of_run: Mapping[str, Any]) -> None:
    """Mark a checkpoint that one rank wrote alone, after an exception: it cannot be resumed. Not collective."""
    rank_zero_warn(
        "This checkpoint is written after an exception, by one rank, so it holds rank 0's replica and cannot be "
        "resumed. Its weights can be loaded. Checkpoints that all ranks write, of rounds at a meeting, can be resumed."
    )
    checkpoint[KEY] = {"version": VERSION, "ranks": None, **of_run}


def cpu_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's buffers on the CPU, by name."""
    return {name: buffer.cpu() for name, buffer in module.named_buffers()}


def average_buffers_of(checkpoint: dict[str, Any], module: nn.Module, excluded: Collection[str]) -> None:
    """Put the mean of all ranks' buffers into the checkpoint; the module's buffers stay as they are. Collective."""
    names = [name for name, _ in module.named_buffers(remove_duplicate=False) if name not in excluded]
    for key in ("state_dict", "current_model_state"):  # the second of WeightAveraging
        state = checkpoint.get(key, {})
        means = {name: state[name].clone() for name in names if isinstance(state.get(name), Tensor)}
        collectives.average_(means.values())
        state.update(means)


def take_from_checkpoint(checkpoint: dict[str, Any], path: object = "the checkpoint") -> Resumed:
    """Put this rank's optimizers and buffers in the place of rank 0's, and return its state. ``path`` is for errors."""
    saved = _saved(checkpoint, path)
    if saved is None or "strategy" in saved:
        raise ValueError(
            f"The checkpoint was not written by a strategy of rounds, so it does not say which round it is of. {_OUT}"
        )
    if len(saved["ranks"]) != collectives.world_size():
        raise ValueError(
            f"The checkpoint was written by {len(saved['ranks'])} ranks, and this fit has "
            f"{collectives.world_size()}: resume with as many. {_OUT}"
        )
    _check_entries(saved, {"round_idx": int}, path)
    _check_entries(checkpoint, {"optimizer_states": list, "state_dict": dict}, path)
    for state in saved["ranks"]:
        _check_entries(state, _OF_RANK, path)
        if len(state["optimizer_states"]) != len(checkpoint["optimizer_states"]):
            raise _damaged(path, f"a rank has the state of {len(state['optimizer_states'])} optimizers")
        for of_optimizer in state["optimizer_states"]:
            _check_entries(of_optimizer, {"state": dict, "param_groups": list}, path)
    mine = saved["ranks"][collectives.rank()]
    _check_tensors(mine, path)
    both = zip(mine["optimizer_states"], checkpoint["optimizer_states"], strict=True)
    pairs = [(entry, whole["state"].get(number, {})) for own, whole in both for number, entry in own["state"].items()]
    if "rows" in mine["extra"] or any(whole.keys() - entry.keys() for entry, whole in pairs):
        raise ValueError(_ROWS_OF_RANKS)
    checkpoint["optimizer_states"] = mine["optimizer_states"]
    checkpoint["state_dict"].update(mine["buffers"])
    return Resumed(mine["random_state"], {**mine["extra"]}, saved["round_idx"], mine["batches_done"])


def take_of_gradients(checkpoint: dict[str, Any], path: object = "the checkpoint") -> Resumed | None:
    """Return this rank's state in a checkpoint of a strategy that exchanges gradients, or None if it has none.

    ``path`` is for errors.
    """
    saved = _saved(checkpoint, path)
    if saved is None:  # of plain DDP
        return None
    if "strategy" not in saved:
        raise ValueError(
            f"The checkpoint was written by a strategy of rounds, whose epochs are rounds and not passes. {_OUT}"
        )
    if "batches_of_step" in saved:
        raise ValueError(f"The checkpoint is of a fit with Holding(AsRanks(...)), which went. {_OUT}")
    num_ranks = len(saved["ranks"])
    if num_ranks != collectives.world_size():
        rank_zero_warn(
            f"The checkpoint was written by {num_ranks} ranks, and this fit has {collectives.world_size()}: "
            "it goes on with other parts, and other draws of dropout."
        )
        return None
    mine: dict[str, Any] = saved["ranks"][collectives.rank()]
    _check_entries(mine, {"random_state": dict, "buffers": dict}, path)
    _check_tensors(mine, path)
    return Resumed(random_state=mine["random_state"], extra=mine)


@torch.no_grad()
def take_first_(tensors: Sequence[Tensor]) -> None:
    """Replace tensors by rank 0's, unless they differ by more than rounding: then they stay as they are. Collective.

    On processors of different kinds, what ranks compute from the same numbers differs in the last digits.
    """
    own = [tensor.clone() for tensor in tensors]
    collectives.broadcast_(tensors)
    if not all(_is_rounding(before, tensor) for before, tensor in zip(own, tensors, strict=True)):
        for before, tensor in zip(own, tensors, strict=True):
            tensor.copy_(before)


def _is_rounding(tensor: Tensor, other: Tensor) -> bool:
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.equal(tensor, other)
    largest = float(other.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(tensor, other, rtol=0.0, atol=_ROUNDING * largest, equal_nan=True)


def _saved(checkpoint: dict[str, Any], path: object) -> dict[str, Any] | None:
    """Return what this package added to a checkpoint, None if nothing; refuse a newer version."""
    if KEY not in checkpoint:
        return None
    saved = checkpoint[KEY]
    _check_entries(checkpoint, {KEY: dict}, path)
    _check_entries(saved, {"version": int}, path)
    if saved["version"] > VERSION:
        raise ValueError(
            f"The checkpoint's state has version {saved['version']}, and this release reads up to {VERSION}: "
            "upgrade lightning_gnn_dist."
        )
    if saved.get("ranks", ()) is None:
        raise ValueError(
            "The checkpoint was written after an exception, by one rank, so it does not say where the others stood and "
            f"cannot be resumed. {_OUT}"
        )
    _check_entries(saved, {"ranks": list}, path)
    return {**saved}


def _check_entries(content: Any, kinds: Mapping[str, type], path: object) -> None:
    """Refuse what is no dict, and an entry that is missing or of another kind; an integer must not be negative."""
    for name, kind in kinds.items():
        value = content.get(name) if isinstance(content, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            raise _damaged(path, f"its entry {name!r} must be a {kind.__name__}, and is {value!r:.60}")


def _damaged(path: object, why: str) -> ValueError:
    return ValueError(f"{path} is damaged ({why}). {_OUT}")


def _check_tensors(state: Mapping[str, Any], path: object) -> None:
    """Refuse buffers that are no tensors, and a state that is none of torch's generator."""
    _check_entries(state["random_state"], {"cpu": Tensor}, path)
    _check_entries(state["buffers"], dict.fromkeys(state["buffers"], Tensor), path)
    generator, known = state["random_state"]["cpu"], torch.get_rng_state()
    if generator.dtype != known.dtype or generator.shape != known.shape:
        raise _damaged(path, "its entry 'cpu' is no state of torch's generator")
