"""Commands on splits of edges, and those that write links."""

import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.cli.train import nodes_asked
from tests.callbacks.test_predictions import NAMES, prepared
from tests.cli.conftest import EXAMPLES, Command
from tests.cli.conftest import run_here as run_here
from tests.cli.test_prepare import check_files_are_compared
from tests.cli.test_train import check_config


@pytest.mark.slow
def test_the_shipped_config_trains(tmp_path: Path) -> None:
    check_config("links.yaml", tmp_path, "mrr")


def test_a_split_of_edges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = lgd.split_edges(lgd.communities(2000))
    split.save(tmp_path / "split")
    main(["inspect", str(tmp_path / "split")])
    held = ", ".join(f"{edges.shape[1]:,} {name}" for name, edges in split.edges.items())
    assert f"held back beside them: {held}\n" in capsys.readouterr().out


def test_predict_writes_the_best_links_of_nodes_that_are_named(tmp_path: Path, run_here: Command) -> None:
    (tmp_path / "ids.txt").write_text("7\n499\n0\n")
    config = (EXAMPLES / "configs" / "links.yaml").read_text()
    (tmp_path / "links.yaml").write_text(re.sub(r"num_nodes: \d+", "num_nodes: 500", config))
    options = [f"--output={tmp_path}/links.npy", "--best_links=4", f"--nodes={tmp_path}/ids.txt", "--leave_out=[self]"]
    run_here("predict", f"--config={tmp_path}/links.yaml", "--trainer.devices=1", *options)
    rows = np.load(tmp_path / "links.npy")
    assert rows["sender"].tolist() == [7] * 4 + [499] * 4 + [0] * 4
    assert (rows["score"].reshape(3, 4)[:, :-1] >= rows["score"].reshape(3, 4)[:, 1:]).all()


def test_nodes_are_named_by_ids_of_tables(tmp_path: Path) -> None:
    graph = lgd.Graph.open(prepared(tmp_path))
    data = lgd.LinkDataModule(lgd.split_edges(graph, negatives=1))
    options = Namespace(nodes=f"{NAMES[7]},{NAMES[2]}", by_user_id=True, ids_of=tmp_path / "graph")
    assert torch.as_tensor(nodes_asked(data, options)).tolist() == [7, 2]
    with pytest.raises(ValueError, match=r"^--by_user_id needs a prepared graph"):
        nodes_asked(data, Namespace(nodes="e", by_user_id=True, ids_of=None))


def test_all_files_are_compared_with_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lgd.split_edges(lgd.communities(2000), negatives=2).save(tmp_path / "links")
    check_files_are_compared(tmp_path / "links", capsys)
