"""A file that records which part of a long work is done, so that it can go on after it was killed."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_gnn_dist.graph.storage.files import check_entries, flush, read_json, write_whole


class Journal:
    """Values by name in ``state.json``. They reach the disk after the files that they describe.

    Args:
        folder: The folder in which the work is done.
        inputs: What the work depends on. A folder with work on other inputs is refused.
    """

    def __init__(self, folder: Path, inputs: dict[str, Any]) -> None:
        self.folder = folder
        self._file = folder / "state.json"
        self._inputs = json.loads(json.dumps(inputs))
        self._values: dict[str, Any] = self._read()

    def get(self, name: str, default: Any = None) -> Any:
        """The value that was recorded last under this name."""
        return self._values.get(name, default)

    def record(self, files: Iterable[Path] = (), **values: Any) -> None:
        """Record values, after ``files``, which they describe, have reached the disk."""
        for file in files:
            flush(file)
        self._values |= values
        write_whole(self._file, json.dumps({"inputs": self._inputs, "values": self._values}))

    def clear(self) -> None:
        """Delete all values."""
        self._values = {}
        self.record()

    def _read(self) -> dict[str, Any]:
        if not self._file.exists():
            return {}
        way_out = f"Delete {self.folder} to begin anew."
        content = read_json(self._file, way_out)
        check_entries(content, {"inputs": dict[str, object], "values": dict[str, object]}, self._file, way_out)
        before, values = content["inputs"], content["values"]
        for name in self._inputs | before:
            if before.get(name) != self._inputs.get(name):
                raise ValueError(
                    f"{self.folder} holds unfinished work with {name} = {before.get(name)}, not "
                    f"{self._inputs.get(name)}: repeat that to finish it, or delete the folder to begin anew."
                )
        return dict(values)


@contextmanager
def journal_of(folder: Path, inputs: dict[str, Any]) -> Iterator[Journal]:
    """The journal of a folder, which is made if missing, and locked against other processes during the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"Another process works in {folder}: let it finish.") from error
        yield Journal(folder, inputs)
