"""The public surface: what the package exports, and the names that Lightning learns."""

import inspect
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from packaging.requirements import Requirement

import lightning_gnn_dist
from lightning_gnn_dist import Drift, GrappaStrategy, LLCGStrategy, LocalSGDStrategy
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.cli.options import BY_LAYER, OF_EXTENSIONS
from lightning_gnn_dist.names import EXTENSIONS, imported
from lightning_gnn_dist.partition.supernode import SUPERNODES_PER_PART
from lightning_gnn_dist.short_names import _CLASSES, _after_import, tell_lightning
from tests.every_strategy import every_strategy
from tests.extensions import MISSING
from tests.pages import gone, public


def test_every_public_name_exists_and_is_documented() -> None:
    names, documented = lightning_gnn_dist.__all__, public()  # type: ignore[attr-defined]
    assert names == sorted(names) and len(names) <= 68
    assert all(getattr(lightning_gnn_dist, name) is documented[name] for name in names if name not in gone())
    assert all(map(inspect.getdoc, documented.values()))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("local_sgd", LocalSGDStrategy),
        ("llcg", LLCGStrategy),
        ("grappa", GrappaStrategy),
        ("lightning_gnn_dist.GrappaStrategy", GrappaStrategy),
    ],
)
def test_a_short_name_gives_the_strategy_with_its_defaults(name: str, strategy: type[Strategy]) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=name, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is strategy
    assert getattr(trainer.strategy, "drift", None) == (Drift("global") if name == "llcg" else None)


def test_the_list_for_tests_has_every_strategy() -> None:
    ours = {
        name for name in StrategyRegistry if StrategyRegistry[name]["strategy"].__module__.startswith("lightning_gnn")
    }
    assert {name for name in ours if "." not in name} == every_strategy().keys()
    assert len(ours) == 2 * len(every_strategy())  # each by the path of its class, too


def test_a_trainer_of_pytorch_lightning_is_told_of_the_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    stranger: Any = ModuleType("pytorch_lightning.strategies")
    stranger.StrategyRegistry = SimpleNamespace(register=lambda name, maker, **_: made.update({name: maker}))
    monkeypatch.setitem(sys.modules, "pytorch_lightning.strategies", stranger)
    tell_lightning(lambda: None)
    assert made.keys() == every_strategy().keys()
    for name, make in every_strategy().items():
        with pytest.raises(TypeError, match=r"import lightning\.pytorch as pl"):
            made[name]()
        assert "import lightning.pytorch as pl" in repr(make())  # which its error shows


def test_no_release_of_lightning_that_runs_foreign_code_is_allowed() -> None:
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    (allowed,) = [one for one in map(Requirement, settings["project"]["dependencies"]) if one.name == "lightning"]
    versions = ["2.6.1", "2.6.2", "2.6.3", "2.6.5", "2.6.6", "2.7.0"]
    assert [version for version in versions if allowed.specifier.contains(version)] == ["2.6.6"]


@pytest.mark.skipif(bool(MISSING), reason="some are taken out")
def test_every_place_of_an_extension_is_there() -> None:
    places = [*EXTENSIONS.values(), *OF_EXTENSIONS, BY_LAYER]
    assert [place for place in places if imported(place) is None] == []
    module = places[0].partition(":")[0]
    with pytest.raises(ModuleNotFoundError, match=f"{module}_no_more"):  # a wrong import is not one that was taken out
        imported(f"{module}_no_more:it")


def test_names_are_those_of_all_extensions_in_an_archive(tmp_path: Path) -> None:
    package = Path(lightning_gnn_dist.__file__).parent
    archive = shutil.make_archive(str(tmp_path / "package"), "zip", package.parent, package.name)
    code = f"import sys\nsys.path.insert(0, {archive!r})\nimport lightning_gnn_dist as there\nprint(len(there.__all__))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert int(run.stdout) == len(vars(lightning_gnn_dist)["__all__"])


# What an import costs: the package and its command line load torch, PyG and Lightning where they are used.


HEAVY = {"torch", "torch_geometric", "lightning", "torchmetrics", "numba", "matplotlib", "scipy", "jsonargparse"}
NOT_FOR_GRAPHS = {"torch_geometric", "lightning", "torchmetrics", "matplotlib", "sympy", "jsonargparse", "pyarrow"}
CALL = "import contextlib\nfrom lightning_gnn_dist.cli.main import main\nwith contextlib.suppress(SystemExit): main({})"


def loaded(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after the code."""
    tell = "import sys\nprint(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{tell}"], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import lightning_gnn_dist",
        *(CALL.format(words) for words in (["--help"], ["--version"], ["nope"], ["prepare", "--help"])),
    ],
)
def test_nothing_heavy_is_imported_for(code: str) -> None:
    assert loaded(code) & HEAVY == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "others"),
    [
        (("cli.inspect", "cli.cutting"), NOT_FOR_GRAPHS),
        (("cli.prepare",), {"lightning", "torchmetrics", "matplotlib"}),
        (("cli.train",), {"starlette", "uvicorn"}),
    ],
)
def test_commands_import_what_they_need(modules: tuple[str, ...], others: set[str]) -> None:
    code = "import " + ", ".join(f"lightning_gnn_dist.{module}" for module in modules)
    assert loaded(code) & others == set()


def test_unknown_names_are_refused_and_public_ones_listed() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Grpah'. Did you mean 'Graph'\?"):
        _ = lightning_gnn_dist.Grpah  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Grpah' from 'lightning_gnn_dist'"):
        from lightning_gnn_dist import Grpah  # type: ignore[attr-defined]  # noqa: F401
    assert set(lightning_gnn_dist.__all__) < set(dir(lightning_gnn_dist))  # type: ignore[attr-defined]


def test_a_module_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_here.py").write_text("import sys\nsys.no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(lightning_gnn_dist._DEFINED_IN, "Broken", "broken_here")
    with pytest.raises(ImportError, match=r"broken_here could not be imported: .* no attribute 'no_such_thing'"):
        _ = lightning_gnn_dist.Broken  # type: ignore[attr-defined]


def test_an_action_runs_once_its_module_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "comes_late.py").write_text("if fails := not __import__('os').environ.get('READY'):\n    1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    before, heard = list(sys.meta_path), []
    _after_import("comes_late", heard.append)
    _after_import("comes_late", heard.append)  # a reload of the package
    with pytest.raises(ZeroDivisionError):
        import comes_late  # type: ignore[import-not-found]
    monkeypatch.setenv("READY", "1")
    import comes_late

    assert heard == [comes_late]
    assert sys.meta_path == before
    _after_import("comes_late", heard.append)
    assert heard == [comes_late, comes_late]
    del sys.modules["comes_late"]


@pytest.mark.slow
def test_names_are_known_where_the_package_is_imported_before_lightning() -> None:
    code = """import lightning_gnn_dist
import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
assert "lightning_gnn_dist.strategies.tma" not in __import__("sys").modules
made = pl.Trainer(accelerator="cpu", devices=1, strategy="llcg", logger=False, enable_checkpointing=False).strategy
assert type(made) is lightning_gnn_dist.LLCGStrategy
from lightning.pytorch.cli import LightningArgumentParser
parser = LightningArgumentParser()
parser.add_argument("--strategy", type=Strategy)
assert parser.parse_args(["--strategy", "TMAStrategy"]).strategy.class_path == "lightning_gnn_dist.TMAStrategy\""""
    assert "lightning" in loaded(code)


def test_short_names_are_those_of_the_classes() -> None:
    made = {name: make().strategy_name for name, make in every_strategy().items()}
    assert made == {name: name for name in _CLASSES}


def test_help_tells_the_default_of_supernodes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    assert f"clusters (default: {SUPERNODES_PER_PART} for each part)" in " ".join(capsys.readouterr().out.split())


def test_what_lightning_warns_of_itself_reaches_nobody() -> None:
    from lightning.pytorch.utilities import CombinedLoader

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tell_lightning(lambda: None)
        CombinedLoader([[1]])
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)  # in other code
    assert [Path(warning.filename) for warning in seen] == [Path(__file__)]
