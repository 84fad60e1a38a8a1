"""What ranks that prepare their shards together agree on before they work: what they were given, and what is left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lightning_gnn_dist.prepare.reading import Reading

WRITTEN, RENAMED = 1, 2  # stages of a rank; before them there is work for which it asks the others


def check_alike(reading: Reading, inputs: Mapping[str, Any], source: Path) -> None:
    """Refuse ranks that were given other files or settings than rank 0. All raise or none.

    Files are compared by their places in ``source`` and their sizes: each host may have them elsewhere.
    """
    told: dict[str, Any] = {name: value for name, value in inputs.items() if name not in ("files", "shard")}
    shard = inputs["shard"] or {}
    told["parts"] = [size for _, size, _ in shard.get("assignment", ())], shard.get("partitioner")
    told["files"] = sorted([_name(Path(path), source), size] for path, (size, _) in inputs["files"].items())
    digest = blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=7).digest()
    found = reading.each(int.from_bytes(digest, "big"))
    if odd := [rank for rank, each in enumerate(found) if each != found[0]]:
        raise ValueError(
            f"Ranks {odd} were given other files or settings than rank 0: start all with the same command, on the same "
            "files."
        )


def needs_no_rank(reading: Reading, stage: int, *, overwrite: bool) -> bool:
    """Whether all shards are written, and some only to be renamed. All ranks raise or none."""
    stages = reading.each(stage)
    if all(stages) and WRITTEN in stages:
        return True
    if RENAMED in stages and stage != RENAMED and not overwrite:
        raise FileExistsError(
            f"The shard of rank {stages.index(RENAMED)} exists already: choose another directory, or overwrite it."
        )
    return False


def _name(path: Path, source: Path) -> str:
    return str(path.relative_to(source)) if path.is_relative_to(source) else path.name
