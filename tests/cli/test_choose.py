"""`choose`: the configuration that it writes is that of the fit it was given, with what was chosen, and runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from lightning_gnn_dist import GrappaStrategy
from lightning_gnn_dist.cli.choose import write
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.strategies.choosing.costs import Decision, Measured, Priced, Steps
from lightning_gnn_dist.strategies.choosing.probe import Parts, Probed
from tests.data_fitting import trainer
from tests.ranks import RankError, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--data.graph.init_args.num_nodes=1000", "--trainer.logger=false"]
QUIET = [f"--trainer.{name}=false" for name in ("enable_progress_bar", "enable_checkpointing", "enable_model_summary")]


def command(rank: int, world_size: int, *arguments: str) -> None:
    """What the console script does in one rank."""
    os.chdir(EXAMPLES)
    sys.argv = ["lightning-gnn-dist", *arguments]
    main()


def test_what_is_written_runs_as_it_stands(tmp_path: Path) -> None:
    out = tmp_path / "chosen.yaml"
    choose = ["choose", "--config=configs/grappa.yaml", *SMALL, *QUIET, f"--out={out}", "--trainer.max_epochs=2"]
    run_ranks(command, 2, *choose, timeout=30)
    run_ranks(command, 2, "fit", f"--config={out}", timeout=30)
    text = out.read_text()
    config = yaml.safe_load(text)
    assert [line.split(" ")[1] for line in text.splitlines()[:3]] == ["Chosen:", "A", "The"]
    strategy = config["trainer"]["strategy"]
    assert strategy["class_path"].startswith("lightning_gnn_dist.strategies.")
    data = config["data"]["init_args"]  # what was named stays, and what was not is said
    assert data["partitioner"]["init_args"] == {"balance": "train"}
    assert data["boundary"]["class_path"].endswith(".Halo") and data["batch_size"] == 256


def test_choices_are_for_several_ranks() -> None:
    with pytest.raises(RankError, match="devices=1 leaves nothing to choose"):
        run_ranks(command, 1, "choose", "--config=configs/grappa.yaml", *SMALL, "--trainer.devices=1", timeout=30)


@pytest.mark.parametrize(("name", "kept"), [("Grappa", {"find_unused_parameters": True}), ("averaging", {})])
def test_what_grappa_is_asked_for_stays_where_it_is_chosen(name: str, kept: dict[str, bool], tmp_path: Path) -> None:
    out = tmp_path / "chosen.yaml"
    asked = trainer(1, GrappaStrategy(find_unused_parameters=True))
    measured = Measured(Steps(0.1, 4), Steps(0.1, 4), 0.01, 0.1, 0.1, None)
    decision = Decision(name, measured, (Priced(name, 0.4, 0.4),))
    write("{trainer: {}, data: {}}", decision, Probed(measured, Parts(None, None), Parts(None, None)), asked, out)
    settings = yaml.safe_load(out.read_text())["trainer"]["strategy"]["init_args"]
    settings.pop("clock", None)
    assert settings == kept
