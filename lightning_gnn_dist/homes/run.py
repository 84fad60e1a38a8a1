"""What a data module knows of the run that it is in: the trainer, if there is one, and what ranks have agreed on."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from llvmlite import binding

from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.batches.source import stream_to
from lightning_gnn_dist.checks import MAX_SEED, shown
from lightning_gnn_dist.homes.settings import LEAST_BYTES, BatchSettings
from lightning_gnn_dist.joint import TrainsReplicasApart
from lightning_gnn_dist.layers.exactness import hops_of_evaluation
from lightning_gnn_dist.layers.layer_pass import Work
from lightning_gnn_dist.layers.through_layers import ModelLayers, layers_as_they_are
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.wire.channel import CPU
from lightning_gnn_dist.wire.collectives import check_group, gather_numbers
from lightning_gnn_dist.wire.memory import free_bytes, free_on, ranks_here

DEFAULT_BYTES = 4 << 30
BUDGET_BYTES = 1 << 30  # of the rows of all nodes
# Of a precision: the type that the whole model computes in, and the narrow one that a step computes in.
_TYPES = {
    "64-true": (torch.float64, None),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-true": (torch.float16, torch.float16),
    "bf16-mixed": (None, torch.bfloat16),
}
_MULTIPLIES_BFLOAT16 = ("avx512bf16", "amx-bf16", "avxneconvert", "bf16")  # the last one on ARM


class Host(NamedTuple):
    """What a host has.

    Attributes:
        free: Bytes that its processes may take beside what they hold, as the system or a control group allows.
        ranks: How many ranks run on it.
    """

    free: int
    ranks: int

    @classmethod
    def here(cls, num_ranks: int) -> Host:
        """Return what this host has, if so many ranks train."""
        return cls(free_bytes(), ranks_here(num_ranks))


class ForgetsRun:
    """What only a run has is in cached properties: a copy is without them, as for a process that Lightning spawns."""

    def rest(self) -> None:
        """Forget what only the run has."""
        for name in self._of_run():
            vars(self).pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        of_run = self._of_run()
        return {name: value for name, value in vars(self).items() if name not in of_run}

    def _of_run(self) -> set[str]:
        """The names of cached properties, but for those of a class that a user derives."""
        package = __name__.partition(".")[0]
        ours = (vars(level) for level in type(self).__mro__ if level.__module__.partition(".")[0] == package)
        return {name for members in ours for name, of in members.items() if isinstance(of, cached_property)}


@dataclass(frozen=True, eq=False)
class RunContext:
    """The run that a data module is in, and how its batches are made. Without a trainer there is one rank.

    Attributes:
        settings: How batches are made.
        trainer: The trainer.
        rank: The rank.
        num_ranks: How many there are.
        stage: What the trainer is doing.
        device: Where it computes.
        dtype: The type of the model's numbers, if batches are brought to it.
        bytes_of_evaluation: Memory that an evaluation may take.
        hosts: Those of the ranks.
        agreed_seed: The checkpoint's, or that of the fit that began.
    """

    settings: BatchSettings
    trainer: Trainer | None = None
    rank: int = 0
    num_ranks: int = 1
    stage: TrainerFn | None = None
    device: torch.device = CPU
    dtype: torch.dtype | None = None
    bytes_of_evaluation: int = DEFAULT_BYTES
    hosts: tuple[Host, ...] = ()
    agreed_seed: int | None = None

    def within(self, trainer: Trainer | None) -> RunContext:
        """Return what it is at this point of a trainer's run, if there is one."""
        if trainer is None:
            return replace(self, trainer=None)
        return replace(
            self,
            trainer=trainer,
            rank=trainer.global_rank,
            num_ranks=trainer.world_size,
            stage=trainer.state.fn,
            device=trainer.strategy.root_device,
            dtype=type_of_model(trainer),
        )

    def at_rest(self) -> RunContext:
        """Return it as it is outside of a run."""
        return replace(self, trainer=None, rank=0, num_ranks=1, stage=None, device=CPU, dtype=None)

    @property
    def module(self) -> LightningModule | None:
        """The model that is trained or evaluated."""
        return None if self.trainer is None else getattr(self.trainer, "lightning_module", None)

    @property
    def widen(self) -> Widen:
        """Which narrow types batches have as float32: as it is said, or all but the one that a step computes in."""
        said = self.settings.loading.widen
        stays = None if self.trainer is None else _TYPES.get(self.trainer.precision, (None, None))[1]
        return said if isinstance(said, bool) else stays or True

    @property
    def seed(self) -> int:
        """The seed of batches: as given; else the checkpoint's, or that of ``seed_everything`` as the fit began."""
        if self.agreed_seed is not None:
            return self.agreed_seed
        if self.settings.seed is not None:
            return int(self.settings.seed)
        said = os.environ.get("PL_GLOBAL_SEED", "0")
        if not said.isascii() or not said.isdigit() or int(said) > MAX_SEED:
            raise ValueError(
                f"PL_GLOBAL_SEED must be an integer between 0 and {MAX_SEED}, as seed_everything sets it, got "
                f"{shown(said)}: unset it, or give a seed to the data module."
            )
        return int(said)

    @property
    def options_of_batches(self) -> dict[str, Any]:
        """What all batches take."""
        loading = self.settings.loading
        how = {"bulk_size": loading.bulk_size, "num_threads": loading.num_threads}
        return {**how, "num_ranks": self.num_ranks, "dtype": self.dtype}

    @property
    def options_of_sources(self) -> dict[str, Any]:
        """What all sources of batches of a graph in RAM take."""
        stream = stream_to(self.device)
        return {"widen": self.widen, "all_labels": self.settings.loading.all_labels, "stream": stream}

    @property
    def work(self) -> Work:
        """How an evaluation computes rows layer by layer."""
        there = self.settings.evaluation.bytes
        return Work(self.device, self.dtype, self.widen, self.bytes_of_evaluation, there)

    def agreed(self, *, is_fit: bool) -> RunContext:
        """Find out the hosts, the memory of an evaluation, and the seed, which is that of rank 0. Collective."""
        if self.trainer is not None and not isinstance(self.trainer.strategy, TrainsReplicasApart):
            check_group(self.num_ranks)  # elastic ranks are groups of their own
        here, given = Host.here(self.num_ranks), self.settings.seed is not None
        free = here.free // here.ranks
        if self.device.type == "cuda":
            free = min(free, free_on(self.device))
        allowed = halved(self.settings.evaluation.bytes or DEFAULT_BYTES, free)
        seed = replace(self, agreed_seed=None).seed if is_fit else self.seed  # a fit before it may have had another
        said = [*here, allowed, seed, given]
        of_ranks = gather_numbers(said, self.device) if self.num_ranks > 1 else [said]
        seeds = [seed for *_, seed, _ in of_ranks]
        if len(set(seeds)) > 1 and any(is_given for *_, is_given in of_ranks):
            raise ValueError(f"All ranks need the same seed, and theirs are {shown(seeds)}: give the same to each.")
        hosts, least = tuple(Host(*row[:2]) for row in of_ranks), min(row[2] for row in of_ranks)
        return replace(self, hosts=hosts, bytes_of_evaluation=least, agreed_seed=seeds[0])

    def with_seed(self, kept: int) -> RunContext:
        """Return it with the seed of the fit of a checkpoint."""
        given = self.settings.seed
        if given is not None and int(given) != kept:
            raise ValueError(
                f"The checkpoint is of a fit with seed {kept}, and this data module has seed={given}, so that its "
                f"batches would be others: give seed={kept} to go on, or begin a new fit with the weights alone, "
                "Model.load_from_checkpoint(path)."
            )
        return replace(self, agreed_seed=kept)

    def sampler_of_evaluation(self, more_hops: int = 0, module: LightningModule | None = None) -> Sampler:
        """Return the sampler of an evaluation: of whole rows, as many hops as the layers of a model say, and more.

        Args:
            more_hops: How many more.
            module: The model. Default: that of the trainer, if there is one.
        """
        module, num_hops = module or self.module, self.settings.training_sampler.num_hops
        hops = num_hops if module is None else hops_of_evaluation(module, num_hops)
        return self.settings.of_evaluation(hops - num_hops + more_hops)

    def layers_of_model(self, data: object, *, is_typed: bool) -> ModelLayers | None:
        """Return the layers of the model, if it has as many as the batches have hops, and these take whole rows.

        The hooks of the data module may change what they see.
        """
        settings = self.settings
        if self.module is None or not settings.evaluates_whole_rows or settings.leaves_types_out:
            return None
        return layers_as_they_are(self.module, data, settings.training_sampler.num_hops, is_typed=is_typed)


def type_of_model(trainer: Trainer | None) -> torch.dtype | None:
    """The type that the whole model computes in, which Lightning does not give to what it takes for data."""
    return None if trainer is None else _TYPES.get(trainer.precision, (None, None))[0]


def warn_of_slow_bfloat16(trainer: Trainer) -> None:
    """Warn if the model computes in bfloat16 on a processor that is faster in float32."""
    if not trainer.precision.startswith("bf16") or trainer.strategy.root_device.type != "cpu":
        return
    features = binding.get_host_cpu_features()
    if features and not any(features.get(name, False) for name in _MULTIPLIES_BFLOAT16):  # some say nothing
        rank_zero_warn(
            f'precision="{trainer.precision}" is slower than "32-true" on this processor, which has no instructions '
            "for bfloat16: a step takes 1.1 to 1.3 times as long with AVX-512, and 5 times with AVX2. Use "
            'precision="32-true", and keep the features alone in bfloat16, data.x = data.x.bfloat16(): they take half '
            "the memory, and batches hold them as float32."
        )


def halved(allowed: int, free: int) -> int:
    """Return the bytes that are allowed, halved until they are at most half of what is free, or the least."""
    while allowed > max(free // 2, LEAST_BYTES):
        allowed //= 2
    return max(allowed, LEAST_BYTES)
