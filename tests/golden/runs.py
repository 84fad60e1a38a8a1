"""What a run is, and how many of them are done in the processes of one job."""

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path

import torch

from tests.golden.place import Place
from tests.golden.tally import Tally
from tests.ranks import quieten, run_ranks

MODULES = ("fits", "shards", "batches", "boundaries", "evaluations", "rows", "stops", "files", "messages", "parts")
MOST = 24  # runs of a job
TIMEOUT = 3600.0  # seconds, for a job on a machine that is busy
RAISED = "raised"
Found = dict[str, dict[str, str]]  # of each run the hashes, by name


@dataclass(frozen=True)
class Run:
    """One computation, done by so many ranks; ``show`` is called on each of them."""

    name: str
    show: Callable[[Tally, Place], None]
    num_ranks: int = 1


@dataclass(frozen=True)
class Job:
    """Runs that the same processes do, one after the other."""

    module: str
    num_ranks: int
    names: Sequence[str]

    def done(self, folder: Path, keep: Path | None) -> Found:
        by_rank = run_ranks(do, self.num_ranks, self.module, self.names, folder, keep, timeout=TIMEOUT)
        found: Found = {}
        for name in self.names:
            found[name] = {
                piece if self.num_ranks == 1 else f"rank {rank}: {piece}": shown
                for rank, of_rank in enumerate(by_rank)
                for piece, shown in of_rank[name].items()
            }
        return found


def runs_of(module: str) -> list[Run]:
    runs: list[Run] = list(import_module(f"tests.golden.{module}").runs())
    assert len({run.name for run in runs}) == len(runs), f"two runs of {module} have one name"
    return runs


def jobs(is_wanted: Callable[[str], bool]) -> Iterator[Job]:
    """The longest first, so that no process is left with one at the end."""
    for module in MODULES:
        wanted = sorted((run for run in runs_of(module) if is_wanted(run.name)), key=lambda run: run.num_ranks)
        for num_ranks, runs in groupby(wanted, key=lambda run: run.num_ranks):
            names = [run.name for run in runs]
            for start in range(0, len(names), MOST):
                yield Job(module, num_ranks, names[start : start + MOST])


def do(rank: int, world_size: int, module: str, names: Iterable[str], folder: Path, keep: Path | None) -> Found:
    """Do the runs of a job, on one of its ranks."""
    quieten()
    warnings.simplefilter("ignore")
    known = {run.name: run for run in runs_of(module)}
    return {name: _shown_by(known[name], rank, folder, keep) for name in names}


def _shown_by(run: Run, rank: int, folder: Path, keep: Path | None) -> dict[str, str]:
    own = folder / "own" / run.name.replace("/", "-")  # the same on all ranks
    own.mkdir(parents=True, exist_ok=True)
    tally = Tally(folder, keeps=keep is not None)
    torch.manual_seed(0)
    try:
        run.show(tally, Place(folder / "shared", own))
    except (Exception, SystemExit) as error:  # the command leaves so
        where = traceback.format_tb(error.__traceback__)[-1].strip().replace("\n", " ")
        tally.say(RAISED, f"{type(error).__name__}: {error} ({where})")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        torch.save(dict(tally.kept), keep / f"{run.name.replace('/', '-')}-rank{rank}.pt")
    return tally.result()


def prepare(rank: int, world_size: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    Place(folder / "shared", folder).prepare()
