"""Each folder of extensions can be deleted: all that is left imports, and without any the four strategies train.

Without any the core's tests are collected too, and some of each kind pass, among them the lines of README. That they
name no extension, and so need none of them singly, is a law of test_architecture.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_server import fast_python

ROOT = Path(__file__).parents[1]
EXTENSIONS = sorted(path.parent.name for path in (ROOT / "lightning_gnn_dist" / "extensions").glob("*/__init__.py"))
FITS = """
import importlib, pkgutil, sys, warnings
from pathlib import Path
import lightning.pytorch as pl, torch

warnings.simplefilter("ignore")
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_gnn_dist"]:
    del sys.modules[name]  # that of the checkout, which the server has imported
import lightning_gnn_dist as package
from lightning_gnn_dist.cli.demo import SAGE

assert Path(package.__file__).parents[1] == Path.cwd()
assert not {gone} & set(package.__all__)
for name in package.__all__:
    getattr(package, name)
for module in pkgutil.walk_packages(package.__path__, "lightning_gnn_dist."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

if __name__ == "__main__" and {trains}:
    clock, one = package.EverySteps(2), package.EverySteps(1)
    strategies = [package.GrappaStrategy(), package.LocalSGDStrategy(clock), package.LLCGStrategy(clock)]
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0)
    for strategy in [*strategies, package.TMAStrategy(one)]:
        data = package.PartitionedDataModule(
            package.communities(300, num_features=32, num_classes=8, seed=0),
            sampler=package.NeighborSampler([5, 5]),
            batch_size=32,
        )
        model = SAGE(32, 8)
        before = [weight.clone() for weight in model.parameters()]
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, **quiet)
        trainer.fit(model, data)
        assert not any(map(torch.equal, before, model.parameters()))
print("done")
"""


def without(names: list[str], folder: Path) -> set[str]:
    """Copy the package without some extensions and the lines that lead to them; return the public names that went.

    Modules of other extensions that import what went go with it.
    """
    package = folder / "lightning_gnn_dist"
    shutil.copytree(ROOT / "lightning_gnn_dist", package)  # with what Python keeps of the modules that stay as they are
    gone, ahead = set(), [f"lightning_gnn_dist.extensions.{name}." for name in names]
    for name in names:
        shutil.rmtree(package / "extensions" / name)
    while ahead:
        module = ahead.pop()
        for path in package.rglob("*.py"):
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if module not in line]
            if len(kept) == len(lines):
                continue
            where = path.relative_to(package).with_suffix("").parts
            assert where[0] in ("__init__", "names", "cli", "extensions", "prepare"), f"{path} names {module}"
            gone |= {line.split()[-1] for line in lines if line not in kept and " as " in line}
            if where[0] == "extensions" and any(line.startswith("from") and module in line for line in lines):
                path.unlink()
                ahead += [".".join(["lightning_gnn_dist", *where]) + end for end in (" import ", ":")]
            else:
                path.write_text("".join(kept))
    return gone


@pytest.mark.slow
@pytest.mark.parametrize("names", [*([name] for name in EXTENSIONS), EXTENSIONS], ids=",".join)
def test_the_core_imports_without_one_and_trains_without_all(names: list[str], tmp_path: Path) -> None:
    gone = without(names, tmp_path)
    code = FITS.replace("{gone}", repr(gone or {""})).replace("{trains}", repr(names == EXTENSIONS))
    (tmp_path / "fits.py").write_text(code)
    run = subprocess.run([fast_python(), "fits.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and "done" in run.stdout, run.stderr[-3000:]


CORE = [f"tests/{name}.py" for name in ("boundary/test_auto", "data/test_settings", "graph/test_graph", "test_public")]
CORE += [f"tests/{name}.py" for name in ("test_docs", "test_readme", "test_readme_code", "test_checks")]
CORE += [
    f"tests/{name}.py" for name in ("partition/test_base", "sampling/test_all_samplers", "strategies/test_one_rank")
]


def folders_of_extensions(folder: str, names: list[str]) -> list[str]:
    return EXTENSIONS if Path(folder).name == "extensions" else []


@pytest.mark.slow
@pytest.mark.first
def test_tests_of_the_core_need_no_extension(tmp_path: Path) -> None:
    without(EXTENSIONS, tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=folders_of_extensions)
    for path in ROOT.iterdir():
        if not (there := tmp_path / path.name).exists():
            there.symlink_to(path)
    pytest_there = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    quick = ["-m", "not slow and not gpu", *CORE]
    for arguments in (["--collect-only"], quick):
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [*pytest_there, *arguments]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
        assert run.returncode == 0, run.stdout[-3000:]
