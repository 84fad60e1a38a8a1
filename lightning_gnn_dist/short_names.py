"""Names that Lightning learns: ``Trainer(strategy="llcg")``, and classes that a configuration names without a module.

A strategy is known by the path of its class, too, where that stands as a text in the place of a name. All work once the
package is imported, before Lightning or after it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_gnn_dist.gone import GONE, way_out

_PACKAGE = __name__.partition(".")[0]
_CLASSES = {  # by `strategy_name`; imported when a Trainer is made with one
    "local_sgd": "LocalSGDStrategy",
    "llcg": "LLCGStrategy",
    "tma": "TMAStrategy",
    "grappa": "GrappaStrategy",
}


def tell_lightning(import_all: Callable[[], None]) -> None:
    """Register the strategies by their names, and import all classes for a ``LightningCLI``: now, or with Lightning.

    Lightning knows no entry points for strategies, and its command line finds imported classes alone, so that an import
    has to do both. It does not import Lightning for it: that takes seconds, and whoever prepares a graph needs none.

    Args:
        import_all: Imports all that the package exports.
    """
    # Lightning warns of its own line, once in every process and phase, whatever loaders it is given.
    deprecated = r".*isinstance\(treespec, LeafSpec\). is deprecated"
    warnings.filterwarnings("ignore", deprecated, FutureWarning, r"lightning\.pytorch\.utilities\._pytree")
    _after_import("lightning.pytorch.strategies", _register)
    _after_import("pytorch_lightning.strategies", _register_refusals)
    _after_import("lightning.pytorch.cli", lambda _: import_all())


def _register(module: ModuleType) -> None:
    for name, strategy in _CLASSES.items():
        about = f"{strategy} with its defaults"
        for said in (name, f"{_PACKAGE}.{strategy}".lower()):  # Lightning looks names up in small letters
            module.StrategyRegistry.register(said, _maker(strategy), description=about, override=True)
    for row in GONE:
        if row.startswith("Trainer.strategy="):
            module.StrategyRegistry.register(row.split("'")[1], partial(_gone, row), description="went", override=True)


def _gone(row: str, **settings: Any) -> None:
    raise ValueError(way_out(row))


def _register_refusals(module: ModuleType) -> None:
    for name in _CLASSES:
        module.StrategyRegistry.register(name, _refuse, description="for lightning.pytorch alone", override=True)


def _refuse(**settings: Any) -> None:
    raise TypeError(
        "The strategies of lightning_gnn_dist are for lightning.pytorch, and this Trainer is of pytorch_lightning, the "
        "same code in another package, whose classes are others: import lightning.pytorch as pl."
    )


def _maker(strategy: str) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        return getattr(sys.modules[_PACKAGE], strategy)(**settings)

    return make


def _after_import(module: str, action: Callable[[ModuleType], None]) -> None:
    if module in sys.modules:
        action(sys.modules[module])
    elif all(finder.module != module for finder in sys.meta_path if isinstance(finder, _AfterImport)):
        sys.meta_path.insert(0, _AfterImport(module, action))


@dataclass
class _AfterImport(MetaPathFinder):
    """Finds nothing itself: lets the others find a module, and acts when its code has run."""

    module: str
    action: Callable[[ModuleType], None]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run_code = spec.loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run_code(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.action(module)

            spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec
