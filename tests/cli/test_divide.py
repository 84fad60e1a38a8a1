"""`divide` as a command."""

from pathlib import Path

import pytest

from lightning_gnn_dist import communities
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.graph.shard import Shard


def test_a_graph_is_divided_into_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    communities(2000).save(tmp_path / "graph")
    main(["divide", str(tmp_path / "graph"), str(tmp_path / "shares"), "--parts", "3", "--partitioner", "random"])
    assert "3 shards of 666 to 667 nodes" in capsys.readouterr().out
    assert sum(Shard.open(tmp_path / "shares", index).rows.num_nodes for index in range(3)) == 2000
    with pytest.raises(SystemExit, match="exists already"):
        main(["divide", str(tmp_path / "graph"), str(tmp_path / "shares"), "--parts", "3"])


def test_what_cannot_be_divided_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a saved graph"):
        main(["divide", str(tmp_path), str(tmp_path / "shares"), "--parts", "2"])
    communities(200).save(tmp_path / "graph")
    unheard = ["--partitioner", "random", "--balance", "train"]
    with pytest.raises(SystemExit, match="for --partitioner metis and kaminpar, and random evens out nodes"):
        main(["divide", str(tmp_path / "graph"), str(tmp_path / "shares"), "--parts", "2", *unheard])
