"""What this package does on a GPU, by one command of under ten minutes: its tests, batches, steps, epochs and waits.

    python benchmarks/gpu.py OUT                  # 2M nodes, 40M edges: 20 GB of RAM, 16 GB of the GPU's memory
    python benchmarks/gpu.py OUT --scale small    # whether all of it runs
    python benchmarks/gpu.py OUT --parts steps epochs

Each part is a process of its own with a limit of time, so that one that fails, hangs or is killed costs no other. In
the folder OUT every figure is in `rows.jsonl` as soon as it is measured; `results.json` and `results.md` are written
anew after each part. Beside them: `tests.txt`, what pytest said, `profile.txt`, the operators of a step, and `log.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from gpu_parts.rows import Rows, read, table

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 570.0  # of all parts
SECONDS_TO_END = 15.0  # for tests that were interrupted, to say how far they came
LIMITS = {  # seconds of each part, in their order, if all have as many as is usual
    "tests": 180,
    "machine": 40,
    "draws": 75,
    "steps": 60,
    "epochs": 60,
    "batches": 75,
    "waits": 60,
    "compiling": 110,
    "others": 60,
}
NO_DEVICE = "No CUDA device: torch {} finds none. Run this where nvidia-smi shows one, with a build of torch for CUDA."


def run_part(name: str, scale: str, out: Path) -> None:
    """Measure one part in this process."""
    rows, scales = Rows(out / "rows.jsonl", name), import_module("gpu_parts.common").SCALES
    with rows.guarded("all of it"):
        import_module(f"gpu_parts.{name}").measure(rows, scales[scale], out)


def run_parts(options: argparse.Namespace) -> None:
    """Start one part after the other, and write what is there after each."""
    end, ended = time.monotonic() + options.seconds, {}
    for name in options.parts:
        start = time.monotonic()
        limit = min(LIMITS[name] * options.seconds / SECONDS, end - start)
        if limit <= 1:
            ended[name] = "not begun: the time of all parts was over"
        else:
            run = run_tests if name == "tests" else run_measure
            ended[name] = f"{run(name, limit, options)} in {time.monotonic() - start:.0f} s"
        print(f"{name}: {ended[name]}", flush=True)
        write(options, ended)


def run_measure(name: str, limit: float, options: argparse.Namespace) -> str:
    own = [sys.executable, __file__, options.out, "--scale", options.scale, "--part", name]
    with (options.out / "log.txt").open("a") as log:
        code = finished(own, limit, log, 0.0)
    if code == 0:
        return "done"
    how = f"stopped at its limit of {limit:.0f} s" if code is None else f"ended with code {code}"
    log_end = "\n".join((options.out / "log.txt").read_text().splitlines()[-30:])
    Rows(options.out / "rows.jsonl", name).failed("all of it", how, log_end)
    return how


def run_tests(name: str, limit: float, options: argparse.Namespace) -> str:
    """The tests of GPUs; warnings fail none, as those of a new machine are many and say little of the package."""
    said, rows = options.out / "tests.txt", Rows(options.out / "rows.jsonl", name)
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "-rfE", "--tb=short", "-W", "default"]
    command += ["-p", "no:cacheprovider", *options.tests]
    if find_spec("xdist") and (cores := len(os.sched_getaffinity(0))) > 3:
        command += ["-n", str(min(8, cores // 2)), "--dist", "worksteal"]
    with said.open("w") as file:
        code = finished(command, limit - SECONDS_TO_END, file, SECONDS_TO_END)
    text = said.read_text()
    summary = re.findall(r"^.*\d+ (?:passed|failed|skipped|error).* in [\d.]+s.*$", text, re.M)[-1:]
    for outcome in ("passed", "failed", "error", "skipped"):
        found = re.findall(rf"(\d+) {outcome}s?\b", summary[0]) if summary else []
        rows.add(outcome, int(found[-1]) if found else 0, "tests")
    for line in re.findall(r"^(?:FAILED|ERROR) .*", text, re.M):
        test, _, why = line.partition(" - ")
        rows.failed(test, why, "see tests.txt")
    if not summary or code not in (0, 1, None):
        rows.failed("all of it", f"pytest ended with code {code}", text[-2000:])
    return f"stopped after {limit - SECONDS_TO_END:.0f} s, before all were run," if code is None else "done"


def finished(command: list[Any], limit: float, file: IO[str], seconds_to_end: float) -> int | None:
    """The exit code of a command, or None if it was interrupted at its limit. None of its processes stays."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds_to_end)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def write(options: argparse.Namespace, ended: dict[str, str]) -> None:
    rows = read(options.out / "rows.jsonl")
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    found = {"scale": options.scale, "written": now, "parts": ended, "rows": rows}
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [f"# On a GPU\n\n`python benchmarks/gpu.py OUT --scale {options.scale}`, {now}\n", *table(rows)]
    lines += ["\n## The parts\n", *(f"- {name}: {how}" for name, how in ended.items())]
    (options.out / "results.md").write_text("\n".join(lines) + "\n")


def options_of_command() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for the results, made if it is not there")
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--parts", nargs="+", choices=LIMITS, default=list(LIMITS), help="these alone")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"of all parts, {SECONDS:.0f} if not given; the limit of each grows with it",
    )
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what pytest is given in the place of all tests")
    parser.add_argument("--part", choices=LIMITS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = options_of_command()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(NO_DEVICE.format(torch.__version__))
    if options.part is not None:
        run_part(options.part, options.scale, options.out)
        return
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("rows.jsonl", "log.txt", "profile.txt"):
        (options.out / name).unlink(missing_ok=True)
    run_parts(options)
    print((options.out / "results.md").read_text())


if __name__ == "__main__":
    main()
