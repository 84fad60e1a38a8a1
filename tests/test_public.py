"""The public surface: what the package exports, and the names that Lightning learns."""

import inspect
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from packaging.requirements import Requirement

import lightning_gnn_dist
from lightning_gnn_dist import Drift, GrappaStrategy, LLCGStrategy, LocalSGDStrategy
from lightning_gnn_dist.short_names import tell_lightning
from tests.every_strategy import every_strategy
from tests.pages import public


def test_every_public_name_exists_and_is_documented() -> None:
    names, documented = lightning_gnn_dist.__all__, public()  # type: ignore[attr-defined]
    assert names == sorted(names) and len(names) <= 68
    assert all(getattr(lightning_gnn_dist, name) is documented[name] for name in names)
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
