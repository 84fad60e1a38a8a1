"""The commands of the guides, as they stand, on a small graph."""

from pathlib import Path

import numpy as np
import pytest

from lightning_gnn_dist import communities
from tests.pages import blocks, run_commands, write_files

# In the order in which one reads on: a graph is prepared, looked at, and asked for predictions.
GUIDES = ("too-large", "choose", "plan", "gpu-training", "new-nodes")
ELSEWHERE = ("serve", "scp", "curl", "pytest")  # in serving/test_app.py, or the reader's own


def commands() -> list[str]:
    text = "".join(block.code for guide in GUIDES for block in blocks("console", guide)).replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    return [line for line in lines if not {*line.split()[:2]} & {*ELSEWHERE}]


@pytest.mark.slow
def test_the_commands_of_the_guides_run(tmp_path: Path) -> None:
    graph = communities(2000, 8, num_features=64).to_pyg()
    (tmp_path / "big").mkdir()
    for name in ("edge_index", "x", "y", "train_mask", "val_mask", "test_mask"):
        np.save(tmp_path / "big" / f"{name}.npy", graph[name].numpy())
    write_files(tmp_path)
    lines = commands()
    asks = next(at for at, line in enumerate(lines) if " predict " in line)
    lines.insert(asks, "lightning-gnn-dist fit --config my.yaml")  # as the quick start has done
    run_commands(lines, tmp_path)
    assert len(lines) > 7 and np.load(tmp_path / "some.npy").shape == (3, 8)
    assert np.load(tmp_path / "all.npy").shape == (2000, 8) and (tmp_path / "my_shares" / "share-00001").is_dir()
