"""What every test shares: one thread, a cache of its own, and the real graphs where they are at hand."""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: the server of tests.ranks must not fork threads
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else a process that asks for GPUs has forks without
os.environ.setdefault("RUST_LOG", "error")  # before torchft is: a line of its threads may crash who sets a variable

import gc
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from tests.extensions import MISSING

if TYPE_CHECKING:
    from torch_geometric.data import Data

# What is by nature about the whole package, golden runs and examples: without one of the extensions that the tests know
# it is not collected. Pages are about all of it too, and skip then what they need of it. All else outside of
# tests/extensions names none.
WHOLE = [
    *("combinations.py", "golden", "gpu", "test_combinations.py", "test_examples.py", "test_golden.py"),
    *("test_hosts.py", "test_notebook.py", "test_tutorials.py"),
]
OF_ALL = [*WHOLE, "test_docs.py", "test_peers.py", "test_readme_code.py"]
collect_ignore = WHOLE if MISSING else []
KERNELS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning_gnn_dist", "kernels")
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


# As pytest's own would: Lightning, which looks when it is imported, writes nothing by itself then.
logging.getLogger().addHandler(logging.NullHandler())


def pytest_configure(config: pytest.Config) -> None:
    """Fork those that tests are dealt to from this process: each would take ten seconds to load what tests need."""
    if (dealt_to := config.getoption("tx", [])) and "PYTEST_XDIST_WORKER" not in os.environ:
        from tests.ranks import HAS_GPU, IS_PRETENDED, fork_server

        if not HAS_GPU and not IS_PRETENDED and hasattr(os, "pidfd_open"):
            import tests.warm  # noqa: F401
            from tests.python_server import fast_python

            fork_server()
            forked = f"popen//python={fast_python()}"
            config.option.tx = [forked if each == "popen" else each for each in dealt_to]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In a copy without some extensions, skip what tries another with one of them."""
    report = yield
    lacks = ("ModuleNotFoundError", "ImportError", "AttributeError")
    of_extensions = collector.path.name in WHOLE or "extensions" in collector.path.parts
    if MISSING and report.failed and of_extensions and any(error in str(report.longrepr) for error in lacks):
        report.outcome = "skipped"
        report.longrepr = str(collector.path), 0, f"needs one of {MISSING}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for no garbage meanwhile: that would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Spare collections of garbage what was imported, a large part of a second each time; then fork who starts ranks.

    Not in the process that only deals tests to others. One of several that tests are dealt to has enough of them to
    load first, and once, what its own and those of ranks need.
    """
    if not session.config.pluginmanager.hasplugin("dsession"):
        from tests.ranks import fork_server, quieten

        quieten()
        if "PYTEST_XDIST_WORKER" in os.environ:
            import tests.warm  # noqa: F401
        gc.freeze()
        fork_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    items.sort(key=lambda item: "first" not in item.keywords)

    if MISSING:
        for item in items:
            if item.path.name in WHOLE:  # and was asked for by its name
                item.add_marker(pytest.mark.skip(reason=f"about all of the package, without {MISSING}"))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def cache(caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test alone, so that no test finds the partitions of another."""
    folder = Path(mkdtemp(dir=caches))  # pytest's numbered folders are counted anew for each: thousands of them
    Path(folder, KERNELS.parent.name).mkdir()
    Path(folder, KERNELS.parent.name, KERNELS.name).symlink_to(KERNELS)  # else each command would compile them anew
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def tmp_path(caches: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of this test alone, with a short path, as sockets want. Pytest looks through all folders for its own."""
    return Path(mkdtemp(prefix=re.sub(r"\W+", "_", request.node.name)[:12], dir=caches))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Take down the process group and the variables that a Trainer leaves: the next test would think itself a rank."""
    environment = dict(os.environ)
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]


@pytest.fixture(autouse=True)
def model_of_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layers of PyG's models were taken out, the model that configurations of examples name is the demo's."""
    if "ready_made" in MISSING:
        monkeypatch.setitem(sys.modules, "node_classification", importlib.import_module("lightning_gnn_dist.cli.demo"))


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What is logged meanwhile. pytest's own looks through all loggers six times a test: a tenth of all time."""
    said, handler = list[str](), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield said
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def informed(logged: list[str]) -> Iterator[list[str]]:
    """The same, with what the package logs for information."""
    logger = logging.getLogger("lightning_gnn_dist")
    logger.setLevel(logging.INFO)
    yield logged
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs beside the checkout."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the folder of real graphs (../shared/data) is not there")
    return SHARED_DATA


@pytest.fixture(scope="session")
def to_pyg(shared_data: Path) -> Callable[..., Data]:
    """The reader of that folder: `to_pyg("cora.npz", split=0)`."""
    reader = module_of(shared_data / "read.py")

    def read(name: str, split: int = 0) -> Data:
        data: Data = reader.to_pyg(shared_data / name, split=split)
        return data

    return read


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
