"""The folder of an extension, its tests and its page can be deleted, and nothing else needs an edit.

What is left imports, but for modules of other extensions that need it. Without any the four strategies train, tests of
the core pass, and the site is built. That they name no extension, and so need none of them singly, is a law of
test_architecture.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import OWN_PAGES
from tests.python_server import fast_python

ROOT = Path(__file__).parents[1]
EXTENSIONS = sorted(path.parent.name for path in (ROOT / "lightning_gnn_dist" / "extensions").glob("*/__init__.py"))
IMPORTS = """
import importlib, pkgutil, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_gnn_dist"]:
    del sys.modules[name]  # that of the checkout, which the server has imported
import lightning_gnn_dist as package
from lightning_gnn_dist.cli.options import parser

assert Path(package.__file__).parents[1] == Path.cwd()
extensions, lacking = "lightning_gnn_dist.extensions.", set()
for module in pkgutil.walk_packages(package.__path__, "lightning_gnn_dist."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert module.name.startswith(extensions) and error.name.startswith(extensions), error
            lacking.add(module.name)
for name in package.__all__:
    if package._DEFINED_IN[name] not in lacking:
        getattr(package, name)
package._import_all(), parser()
"""
FITS = """
import lightning.pytorch as pl, torch
from lightning_gnn_dist.cli.demo import SAGE

if __name__ == "__main__":
    assert not lacking
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
"""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
CORE = [f"tests/test_{name}.py" for name in ("checks", "docs", "public", "readme", "readme_code")]
CORE += [f"tests/{name}.py" for name in ("boundary/test_auto", "cli/test_options", "data/test_settings")]
CORE += [f"tests/{name}.py" for name in ("graph/test_graph", "partition/test_base", "partition/test_default")]
CORE += [f"tests/{name}.py" for name in ("sampling/test_all_samplers", "strategies/test_one_rank")]


def copy_without(names: list[str], folder: Path) -> None:
    """Copy the checkout without the folders and pages of some extensions."""
    for copied in ("lightning_gnn_dist", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / copied, folder / copied)  # with what Python keeps of modules
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)
    for name in names:
        shutil.rmtree(folder / "lightning_gnn_dist" / "extensions" / name)
        shutil.rmtree(folder / "tests" / "extensions" / name)
        if name in OWN_PAGES:
            (folder / "docs" / OWN_PAGES[name]).unlink()


def run(folder: Path, *command: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTENSIONS)
def test_all_else_imports_without_one(name: str, tmp_path: Path) -> None:
    copy_without([name], tmp_path)
    (tmp_path / "imports.py").write_text(IMPORTS)
    run(tmp_path, fast_python(), "imports.py")


@pytest.mark.slow
def test_the_core_trains_without_all(tmp_path: Path) -> None:
    copy_without(EXTENSIONS, tmp_path)
    (tmp_path / "fits.py").write_text(IMPORTS + FITS)
    run(tmp_path, fast_python(), "fits.py")


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize("names", [["asking"], EXTENSIONS], ids=["what most need", "all"])
def test_tests_need_no_extension_that_is_not_there(names: list[str], tmp_path: Path) -> None:
    copy_without(names, tmp_path)
    quick = [*PYTEST, "-m", "not slow and not gpu"]
    run(tmp_path, *quick, "--collect-only")
    run(tmp_path, *quick, *(CORE if names == EXTENSIONS else ["tests/test_docs.py", "tests/test_public.py"]))


@pytest.mark.slow
def test_the_site_needs_no_extension(tmp_path: Path) -> None:
    copy_without(EXTENSIONS, tmp_path)
    run(tmp_path, *PYTEST, "tests/test_docs.py::test_the_site")
