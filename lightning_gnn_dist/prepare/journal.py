"""What of a long piece of work is done, kept in a file, so that it goes on after it was killed."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_gnn_dist.graph.storage.drafts import write_whole
from lightning_gnn_dist.graph.storage.files import check_entries, flush, read_json

RECORD_SECONDS = 30.0  # work that a kill may cost; recording waits for the disk


class Journal:
    """Values by name in ``state.json``. What is recorded is on the disk, and so are the files it speaks of.

    Args:
        folder: Where the work is done.
        inputs: What the work depends on: it goes on only if they are the same.
    """

    def __init__(self, folder: Path, inputs: dict[str, Any]) -> None:
        self.folder = folder
        self._file = folder / "state.json"
        self._inputs = json.loads(json.dumps(inputs))
        self._values: dict[str, Any] = self._read()
        self._recorded = time.monotonic()

    def get(self, name: str, default: Any = None) -> Any:
        """What was recorded last under this name."""
        return self._values.get(name, default)

    def is_due(self) -> bool:
        """Whether so much was done since the last record that it should not be lost."""
        return time.monotonic() - self._recorded >= RECORD_SECONDS

    def record(self, files: Iterable[Path] = (), **values: Any) -> None:
        """Record values, after the files that they speak of have reached the disk."""
        for file in files:
            flush(file)
        self._values |= values
        write_whole(self._file, json.dumps({"inputs": self._inputs, "values": self._values}))
        self._recorded = time.monotonic()

    def forget(self, *names: str) -> None:
        """Take back what was recorded under these names."""
        self._values = {name: value for name, value in self._values.items() if name not in names}
        self.record()

    def clear(self) -> None:
        """Take back everything."""
        self.forget(*self._values)

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
    """The journal of a folder, which is made and which no other process may work in meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"Another process works in {folder}: let it finish.") from error
        yield Journal(folder, inputs)
