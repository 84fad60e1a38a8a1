"""What a run has shown, as one hash for each name: down to the bit, and in no order of attributes."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist import Graph

OF_BLOCKS = ("num_dst", "num_src", "indptr", "indices", "weight", "dtype", "is_corrected")
OF_BATCHES = ("batch_size", "num_targets", "is_filler", "seed_type")  # properties, which no store lists


class Tally:
    """Takes values under names, and gives a hash of all values of a name, in the order in which they came.

    Args:
        folder: A folder whose path texts are not to show, as each run has another.
        keeps: Whether the values themselves are kept, to be looked at.
    """

    def __init__(self, folder: Path, *, keeps: bool = False) -> None:
        self._folder, self._keeps = folder, keeps
        self._digests: dict[str, Any] = defaultdict(lambda: hashlib.blake2b(digest_size=8))
        self._texts: dict[str, str] = {}
        self.kept: dict[str, list[Any]] = defaultdict(list)

    def add(self, name: str, value: Any) -> None:
        for place, leaf in leaves(name, value):
            for piece in pieces_of(leaf):
                self._digests[place].update(piece)
            if self._keeps:
                self.kept[place].append(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)

    def say(self, name: str, text: str) -> None:
        """Show a text itself, which tells more than its hash."""
        self._texts[name] = self.plain(text)

    def plain(self, text: str) -> str:
        """The text without what differs between two runs of the same code."""
        text = text.replace(str(self._folder), "<folder>")
        return re.sub(r"\b0x[0-9a-f]{6,}\b", "<address>", text)

    def result(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self._digests.items()} | self._texts


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The pieces of a value with names that tell where they are; those of a list share its name."""
    if isinstance(value, Mapping):
        yield f"{name}.keys", sorted(map(word, value))
        for key in sorted(value, key=word):
            yield from leaves(f"{name}.{word(key)}", value[key])
    elif isinstance(value, list | tuple) and not _is_plain(value):
        yield name, len(value)
        for item in value:
            yield from leaves(name, item)
    elif isinstance(value, Graph):
        yield from leaves(name, {"arrays": value.arrays, "fingerprint": value.fingerprint})
    else:
        yield name, value


def word(key: Any) -> str:
    return "__".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _is_plain(value: list[Any] | tuple[Any, ...]) -> bool:
    return all(isinstance(each, bool | int | float | str | None) for each in value)


def pieces_of(leaf: Any) -> Iterator[bytes]:
    """The bytes that make a value what it is."""
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(np.ascontiguousarray(leaf))
    if isinstance(leaf, Tensor):
        array = leaf.detach().cpu().contiguous()
        yield f"{array.dtype}{tuple(array.shape)}".encode()
        yield array.view(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b""
    elif isinstance(leaf, Path):
        yield leaf.read_bytes()
    elif isinstance(leaf, bool | int | float | str | bytes | list | tuple | Enum | torch.dtype | None):
        yield f"{leaf!r};".encode()
    else:
        raise TypeError(f"A golden run showed a {type(leaf).__name__}, of which nobody knows the bytes.")


def content_of(batch: Any) -> dict[str, Any]:
    """Everything public in a batch, with types or without."""
    content = {f"the {name}": getattr(batch, name, None) for name in OF_BATCHES}
    for name, value in batch.to_dict().items():
        content["global" if name == "_global_store" else word(name)] = value
    for layer, blocks in enumerate(getattr(batch, "blocks", ())):
        content[f"blocks {layer}"] = blocks_of(blocks)
    return content


def blocks_of(blocks: Any) -> Any:
    if isinstance(blocks, Mapping):
        return {word(kind): blocks_of(block) for kind, block in blocks.items()}
    return [getattr(blocks, name) for name in OF_BLOCKS]
