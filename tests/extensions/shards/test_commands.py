"""Commands that make shards, tell of them and train on them."""

import re
from pathlib import Path

import numpy as np
import pytest

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.shards.index import Shard
from tests.cli.conftest import EXAMPLES
from tests.cli.test_train import SMALL, command, logged
from tests.ranks import run_ranks


def test_a_host_prepares_its_own_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "source", tmp_path / "shares"
    source.mkdir()
    np.save(source / "edge_index.npy", np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))
    np.save(source / "x.npy", np.ones((4, 2), np.float32))
    np.save(source / "train_idx.npy", np.array([0, 3]))
    for index in (0, 1):
        main(["prepare", str(source), str(out), "--undirected", "--shard", str(index), "--num-shards", "2"])
        assert f"share-0000{index}: 2 nodes, 4 edges" in capsys.readouterr().out
    assert [Shard.open(out, index).rows.indices.tolist() for index in (0, 1)] == [[1, 3, 0, 2], [1, 3, 0, 2]]
    with pytest.raises(SystemExit, match="exists already"):
        main(["prepare", str(source), str(out), "--undirected", "--shard", "0", "--num-shards", "2"])
    with pytest.raises(SystemExit, match="--shard and --num-shards belong together"):
        main(["prepare", str(source), str(out), "--shard", "0"])
    with pytest.raises(SystemExit, match="add --shard"):
        main(["prepare", str(source), str(out), "--assignment", "parts.npy"])


def test_a_graph_is_divided_into_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lgd.communities(2000).save(tmp_path / "graph")
    main(["divide", str(tmp_path / "graph"), str(tmp_path / "shares"), "--parts", "3", "--partitioner", "random"])
    assert "3 shards of 666 to 667 nodes" in capsys.readouterr().out
    assert sum(Shard.open(tmp_path / "shares", index).rows.num_nodes for index in range(3)) == 2000
    with pytest.raises(SystemExit, match="exists already"):
        main(["divide", str(tmp_path / "graph"), str(tmp_path / "shares"), "--parts", "3"])


def test_what_cannot_be_divided_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a saved graph"):
        main(["divide", str(tmp_path), str(tmp_path / "shares"), "--parts", "2"])
    lgd.communities(200).save(tmp_path / "graph")
    unheard = ["--partitioner", "random", "--balance", "train"]
    with pytest.raises(SystemExit, match="for --partitioner metis and kaminpar, and random evens out nodes"):
        main(["divide", str(tmp_path / "graph"), str(tmp_path / "shares"), "--parts", "2", *unheard])


@pytest.mark.slow
def test_any_data_module_has_a_class_path(tmp_path: Path) -> None:
    graph = lgd.communities(2000)
    lgd.save_shards(graph, lgd.RandomPartitioner()(graph, 2, seed=0), tmp_path / "shares")
    config = (EXAMPLES / "configs" / "llcg.yaml").read_text()
    data = f"data: {{class_path: lightning_gnn_dist.PartitionedDataModule, init_args: {{graph: {tmp_path}/shares}}}}\n"
    (tmp_path / "shares.yaml").write_text(re.sub(r"data:\n.*?(?=trainer:)", data, config, flags=re.DOTALL))
    options = [f"--trainer.logger.init_args.save_dir={tmp_path}", "--trainer.max_epochs=1", *SMALL[1:]]
    run_ranks(command, 2, "fit", f"--config={tmp_path}/shares.yaml", *options)
    assert logged(tmp_path / "llcg" / "version_0")[-1] > 0.15
    layered = [f"--output={tmp_path}/logits.npy", *options]
    run_ranks(command, 2, "predict", f"--config={tmp_path}/shares.yaml", *layered)
    assert np.load(tmp_path / "logits.npy").shape == (2000, 8)
