"""Compare what runs show before a change and after it, when the change must alter nothing.

    python -m tests.golden before.json                          # at the commit before the change
    python -m tests.golden after.json --against before.json     # after it

Each run shows many values, by name: fields of batches, trained weights, moments of optimizers, metrics, predictions,
bytes that ranks have sent, written files, and the texts of refusals. Sums come out with other last bits on other
processors and other versions of torch: compare on one machine, and keep no hashes in the repository. Runs and values
that only one file has are listed, and are no difference.

A run that differs is looked at with ``--only NAME --keep FOLDER``, before and after: the values themselves are written
there, for torch.load(..., weights_only=False).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from difflib import unified_diff
from fnmatch import fnmatch
from pathlib import Path

from tests.golden.runs import RAISED, Found, Job, jobs, prepare
from tests.ranks import run_ranks

AT_ONCE = 2  # jobs, each of which has processes of its own
MOST_LETTERS = 300  # of an error


def main() -> int:
    options = parsed()
    start, found = time.monotonic(), Found()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of ranks: warnings about typed models
    with tempfile.TemporaryDirectory(prefix="golden-") as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name)
        run_ranks(prepare, 1, folder)
        wanted = list(jobs(lambda name: fnmatch(name, options.only) or name.startswith(options.only)))
        for of_job in pool.map(lambda job: timed(job, folder, options.keep), wanted):
            found |= of_job
    options.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    raised = [f"{name}, {key}: {text}" for name, shown in found.items() for key, text in shown.items() if RAISED in key]
    say(f"{len(found)} runs with {sum(map(len, found.values()))} values in {time.monotonic() - start:.0f} s")
    say(*(f"raised   {each[:MOST_LETTERS]}" for each in raised))
    if options.against is None:
        return int(bool(raised))
    differs = compare(json.loads(options.against.read_text()), found, options.most)
    return int(differs or bool(raised))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="where the hashes are written")
    parser.add_argument("--against", type=Path, help="hashes to compare with")
    parser.add_argument("--only", default="", help="runs whose names begin so, or match a pattern such as */shards")
    parser.add_argument("--keep", type=Path, help="a folder for the values themselves")
    parser.add_argument("--most", type=int, default=12, help="how many values of a run that differs are listed")
    return parser.parse_args()


def timed(job: Job, folder: Path, keep: Path | None) -> Found:
    start = time.monotonic()
    found = job.done(folder, keep)
    say(f"{time.monotonic() - start:5.1f} s  {len(found):3} runs on {job.num_ranks}: {job.names[0]} ...")
    return found


def compare(before: Found, after: Found, most: int) -> bool:
    """Say what differs, and whether anything does."""
    differ = 0
    for name in sorted(before.keys() & after.keys()):
        ours, theirs = after[name], before[name]
        values = sorted(key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key])
        alone = sorted(ours.keys() ^ theirs.keys())
        differ += bool(values)
        if values:
            say(f"differs  {name}")
            say(*(f"           {key}: {changed(theirs[key], ours[key])}" for key in values[:most]))
            say(*[f"           and {len(values) - most} other values"] * (len(values) > most))
        if alone:
            say(f"alone    {name}: {', '.join(('+' if key in ours else '-') + key for key in alone[:most])}")
    say(*(f"before alone  {name}" for name in sorted(before.keys() - after.keys())))
    say(*(f"after alone   {name}" for name in sorted(after.keys() - before.keys())))
    say(f"{len(before.keys() & after.keys())} runs compared, {differ} differ")
    return differ > 0


def changed(before: str, after: str) -> str:
    """One as the other, or the lines of a text that are not the same."""
    if "\n" not in before + after:
        return f"{before} -> {after}"
    return "\n".join(list(unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:])


def say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
