"""A file that is cut short while it is mapped ends the process, with a sentence."""

import os
import sys
from pathlib import Path

import pytest
import torch

from lightning_gnn_dist import Graph
from tests.ranks import start_ranks


def look_at_what_is_gone(rank: int, world_size: int, path: str, log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    graph = Graph.open(path)
    os.truncate(f"{path}/nodes/x.npy", 128)
    graph.node_arrays["x"].sum()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the signal may be another")
def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), 10_000, {"x": torch.ones(10_000, 9)}).save(path)
    with start_ranks(look_at_what_is_gone, 1, str(path), str(tmp_path / "log")) as ranks:
        ranks.results(may_die={0})
    said = (tmp_path / "log").read_text()
    assert "a file was cut short while it was mapped" in said and str(path) in said
