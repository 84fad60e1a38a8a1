"""Golden runs have names of their own, and what differs between two of them is said."""

from pathlib import Path

from tests.golden.runs import MODULES, jobs, runs_of


def test_every_run_is_in_one_job() -> None:
    names = [run.name for module in MODULES for run in runs_of(module)]
    assert len(names) == len(set(names)) > 690
    dealt = [name for job in jobs(lambda name: True) for name in job.names]
    assert sorted(dealt) == sorted(names)
    found = {path.stem for path in (Path(__file__).parent / "golden").glob("*.py") if "def runs()" in path.read_text()}
    assert found == set(MODULES)
