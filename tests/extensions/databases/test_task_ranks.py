"""A task of a database is learned and judged on several ranks as on one, by the model of the examples."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_gnn_dist import EverySteps, GrappaStrategy, LLCGStrategy, PartitionedDataModule, prepare_graph
from lightning_gnn_dist.extensions.databases.shop import write_shop
from tests.pages import ROOT
from tests.ranks import run_ranks


def figures(rank: int, world_size: int, path: str, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics before and after a short fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        from relational import RelationalSAGE

    pl.seed_everything(0, verbose=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategies: dict[str, Any] = {"one": "auto", "grappa": GrappaStrategy(), "llcg": LLCGStrategy(EverySteps(2))}
    trainer = pl.Trainer(
        accelerator="cpu", devices=world_size, strategy=strategies[name], max_epochs=1, num_sanity_val_steps=0, **quiet
    )
    data = PartitionedDataModule(path, task="stays", batch_size=64)
    module = RelationalSAGE(path, "stays", channels=4)
    (before,) = trainer.test(module, data, verbose=False)
    trainer.fit(module, data)
    return dict(before), {key: float(value) for key, value in trainer.callback_metrics.items() if key[:4] == "val_"}


@pytest.mark.slow
def test_metrics_are_those_of_one_rank(tmp_path: Path) -> None:
    write_shop(tmp_path / "shop", 120)
    prepare_graph(tmp_path / "shop", path := str(tmp_path / "graph"))
    (one,) = run_ranks(figures, 1, path, "one")
    for name in ("grappa", "llcg"):
        of_ranks = run_ranks(figures, 2, path, name)
        assert of_ranks[0] == of_ranks[1]
        assert of_ranks[0][0] == pytest.approx(one[0], abs=1e-6) and one[0].keys() == {"test_auroc", "test_ap"}
        assert of_ranks[0][1].keys() == {"val_auroc", "val_ap"} and of_ranks[0][0] != of_ranks[0][1]
