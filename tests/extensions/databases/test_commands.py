"""From the made-up shop to tables of predictions, by the commands and the configurations that ship."""

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_gnn_dist import EverySteps, GrappaStrategy, LLCGStrategy, PartitionedDataModule
from lightning_gnn_dist.cli.main import main
from tests.cli.test_train import command
from tests.data_fitting import trainer
from tests.extensions.databases.folders import write_shop
from tests.pages import ROOT
from tests.python_server import fast_python
from tests.ranks import run_ranks

WHERE = {"relational.yaml": "--data.graph", "recommending.yaml": "--data.init_args.split"}  # the option of the graph
COLUMNS = {
    "relational.yaml": ["customer_id", "at", "row"],
    "recommending.yaml": ["question", "sender", "time", "receiver", "score"],
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    write_shop(folder / "shop", 200)
    main(["prepare", str(folder / "shop"), str(folder / "shop_graph")])
    return folder / "shop_graph"


@pytest.mark.slow
@pytest.mark.parametrize("name", WHERE)
def test_a_shipped_config_goes_from_tables_to_a_table(name: str, graph: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    own = [f"--config=configs/{name}", f"--model.init_args.graph={graph}", f"{WHERE[name]}={graph}"]
    own += [f"--trainer.logger.init_args.save_dir={tmp_path}", "--trainer.enable_progress_bar=false"]
    own += ["--trainer.log_every_n_steps=1"]
    run_ranks(command, 2, "fit", *own, "--trainer.max_epochs=1")
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    out = tmp_path / "found.parquet"
    run_ranks(command, 2, "predict", *own, f"--ckpt_path={checkpoint}", f"--output={out}")
    found = parquet.read_table(out)
    assert found.column_names == COLUMNS[name] and found.num_rows > 0


def test_a_shop_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    command = [fast_python(), str(ROOT / "examples" / "shop.py"), str(tmp_path / "a"), "--customers", "100"]
    run = partial(subprocess.run, command, capture_output=True, text=True)
    assert "prepare" in run(check=True).stdout
    write_shop(tmp_path / "b", 100)
    write_shop(tmp_path / "c", 100, seed=1)
    names = [path.relative_to(tmp_path / "a") for path in sorted((tmp_path / "a").rglob("*")) if path.is_file()]
    assert len(names) == 9 and all(
        (tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names
    )
    assert (tmp_path / "a" / "order.csv").read_bytes() != (tmp_path / "c" / "order.csv").read_bytes()
    assert "a is there already: name another folder" in run().stderr


def judged(rank: int, world_size: int, path: str, strategy: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of the model of the examples before and after a short fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        from relational import RelationalSAGE

    pl.seed_everything(0, verbose=False)
    running, data = trainer(world_size, strategy, max_epochs=1), PartitionedDataModule(path, task="stays")
    module = RelationalSAGE(path, "stays", channels=4)
    (before,) = running.test(module, data, verbose=False)
    running.fit(module, data)
    return dict(before), {name: float(each) for name, each in running.callback_metrics.items() if name[:4] == "val_"}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [GrappaStrategy, partial(LLCGStrategy, EverySteps(2))], ids=["grappa", "llcg"])
def test_metrics_of_several_ranks_are_those_of_one(strategy: Callable[[], Any], graph: Path) -> None:
    ((before, _),) = run_ranks(judged, 1, str(graph), "auto")
    first, second = run_ranks(judged, 2, str(graph), strategy())
    assert first == second and first[0] == pytest.approx(before, abs=1e-6)
    assert before.keys() == {"test_auroc", "test_ap"} and first[1].keys() == {"val_auroc", "val_ap"}
