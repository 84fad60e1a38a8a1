"""Short names: ``Trainer(strategy="llcg")`` works once the package is imported."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gnn_dist.strategies.grappa import GrappaStrategy
from lightning_gnn_dist.strategies.llcg import LLCGStrategy
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from lightning_gnn_dist.strategies.tma import TMAStrategy


def register() -> None:
    """Tell Lightning the names. It knows no entry points for strategies, so an import has to do it."""
    for strategy in (LocalSGDStrategy, LLCGStrategy, TMAStrategy, GrappaStrategy):
        name = strategy.strategy_name
        StrategyRegistry.register(name, strategy, description=f"{strategy.__name__} with its defaults", override=True)
