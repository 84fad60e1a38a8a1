"""A part that several ranks of a host hold: one of them reads it and writes it to files, and all of them map these.

Whoever needs a part first reads it, while those who need it too wait at a lock, which the system frees when its process
ends. So ranks may be in different super-epochs, and if a rank dies the next one reads in its place. Files are removed
once all ranks have mapped them: their pages stay in memory, once, as long as a rank has the part.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.homes.parts import Holder, PartReader, ReadPart
from lightning_gnn_dist.wire.channel import CPU
from lightning_gnn_dist.wire.collectives import gather_numbers, gather_objects
from lightning_gnn_dist.wire.launching import by_value

_PART, _READ = "part", "read"


def check_holders(holder: Holder, num_ranks: int) -> None:
    """Refuse ranks of which nobody says who share a host. All raise or none. Collective.

    Args:
        holder: Who holds this rank's part.
        num_ranks: How many ranks there are.
    """
    _, num_parts, _, num_members = holder
    places = sorted((part, member) for part, _, member, _ in gather_numbers(holder, CPU))
    if places != [*product(range(num_parts), range(num_members))] or len(places) != num_ranks:
        raise ValueError(
            f'Holding(per="host") takes num_nodes={num_parts} hosts of devices={num_members} ranks, as the trainer '
            f"says, and its {num_ranks} ranks are told to be (host, number there) {shown(places)}: start equally "
            "many on each host, or leave per out."
        )


class Shelf:
    """The folder where the ranks of a host share parts in a fit. Collective.

    Args:
        holder: Who holds a part.
    """

    def __init__(self, holder: Holder) -> None:
        self._num_members = holder.num_members
        self._own = None if holder.member else TemporaryDirectory(prefix="parts-", ignore_cleanup_errors=True)
        of_ranks = [Holder(*row) for row in gather_numbers(holder, CPU)]
        folders = gather_objects("" if self._own is None else self._own.name, everywhere=True)
        assert folders is not None
        self._folder = Path(folders[of_ranks.index(holder._replace(member=0))])
        sees = [bool(number) for (number,) in gather_numbers([self._folder.is_dir()], CPU)]
        if not all(sees):
            self.close()
            raise ValueError(
                f'Holding(per="host") shares parts in files, and rank {sees.index(False)} does not see {folders[0]} or '
                "its like, which the first rank of its host has made: let TMPDIR name a folder that all ranks of a "
                "host see."
            )

    @classmethod
    def of(cls, holder: Holder, num_ranks: int) -> Shelf | None:
        """Return it where several ranks hold a part; refuse a launcher that does not say which. Collective."""
        check_holders(holder, num_ranks)
        return cls(holder) if holder.num_members > 1 else None

    def shared(self, reader: PartReader) -> PartReader:
        """Return what reads the same parts, each once for all ranks of a host."""
        return SharedPartReader(**vars(reader), folder=self._folder, num_members=self._num_members)

    def close(self) -> None:
        """Remove the folder."""
        if self._own is not None:
            self._own.cleanup()


@dataclass(frozen=True, eq=False)
class SharedPartReader(PartReader):
    """Reads a part for all ranks of a host, or maps what another has read.

    Args:
        folder: Where the files of parts lie, the same for these ranks.
        num_members: How many they are.
    """

    folder: Path = Path()
    num_members: int = 1

    def read(self, super_epoch: int, previous: ReadPart | None = None) -> ReadPart:
        place = self.folder / str(super_epoch)
        with _locked(place.with_suffix(".lock")):
            if not place.exists():
                self._write(super().read(super_epoch, previous), place)
            part: ReadPart = by_value.read(place / _PART)
            self._count_reader(place)
        return part

    def _write(self, part: ReadPart, place: Path) -> None:
        """Write a part, all of it or nothing."""
        unfinished = place.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a rank that died
        unfinished.mkdir()
        try:
            by_value.write(unfinished / _PART, part)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            error.add_note(
                f"The ranks of a host share a part of {part.graph.num_bytes} bytes in the folder of temporary files: "
                'name another one by TMPDIR, or leave per="host" out of Holding().'
            )
            raise
        unfinished.rename(place)

    def _count_reader(self, place: Path) -> None:
        """Note that one more has mapped the files, and remove them after the last one."""
        count = place / _READ
        have_read = len(count.read_bytes()) + 1 if count.exists() else 1
        if have_read == self.num_members:
            shutil.rmtree(place)
        else:
            count.write_bytes(b"." * have_read)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Let no other process into such a block with the same file."""
    with file.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
