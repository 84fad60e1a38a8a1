"""The examples run as they stand, from a script, with the ranks that Lightning starts for them."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from pyarrow import parquet
from torch_geometric.data import Data, HeteroData
from torch_geometric.distributed import Partitioner, partition

from lightning_gnn_dist import Graph
from tests.conftest import module_of
from tests.graph.equal import check_equal
from tests.python_server import fast_python

EXAMPLES = Path(__file__).parents[1] / "examples"
LEAST = {
    "link_prediction": ("mrr", 0.4),
    "edge_ratings": ("r2", 0.4),
    "recommender": ("mrr", 0.45),
    "relational": ("auroc", 0.7),
}  # of the others: an accuracy of 0.6

OPTIONS = {
    "whole_graph": ["", "--shards shares"],
    "typed_graph": ["", "--shards shares"],
    "link_prediction": ["", "--shards shares"],
    "node_rows": ["", "--owned"],
    "strategies": ["llcg", "tma", "history", "grappa"],
}
LINES = [
    f"{path.stem} {options}".strip()
    for path in sorted(EXAMPLES.glob("*.py"))
    if not path.stem.startswith(("from_", "compare_", "shop"))  # below, a picture, and tables
    for options in OPTIONS.get(path.stem, [""])
]


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_an_example_trains_and_tests(line: str, tmp_path: Path) -> None:
    name, *options = line.split()
    python = fast_python()
    if name == "ray_train":
        pytest.importorskip("ray", reason='Ray is not installed: pip install "ray[train]"')
        python = sys.executable  # whose processes Ray starts
    command = [python, str(EXAMPLES / f"{name}.py"), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    metric, least = LEAST.get(name, ("accuracy", 0.6))
    (result,) = re.findall(rf"{metric}\D+(0\.\d+)", run.stdout)[-1:]  # of the test, after those of all rounds
    assert float(result) > least


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Draw curves in this process, and return why not."""
    monkeypatch.chdir(tmp_path)
    script = module_of(EXAMPLES / "compare_runs.py")

    def draw(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["compare_runs.py", *words])
        try:
            script.main()
        except SystemExit as stop:
            return str(stop)
        return ""

    return draw


def log_run(folder: Path, name: str, metric: str = "accuracy") -> None:
    """Write what a fit of three epochs leaves: bytes and metrics of a step in lines of their own."""
    logger = CSVLogger(folder / "runs", name)
    for epoch in range(3):
        step = 10 * epoch + 9
        logger.log_metrics({"comm/bytes_sent": 1e6 * epoch, "val_loss": 1.0 / (epoch + 1), "epoch": epoch}, step)
        logger.log_metrics({metric: 0.5 + epoch / 10, "epoch": epoch}, step)
    logger.log_metrics({"report/bytes_sent": 3e6}, 30)
    logger.save()


def test_curves_of_runs_are_drawn(tmp_path, compare, capsys) -> None:
    log_run(tmp_path, "llcg"), log_run(tmp_path, "grappa")
    runs = ["runs/llcg/version_0", "runs/grappa/version_0/metrics.csv"]
    svg = ["--over", "comm/bytes_sent", "--out", "there/curves.svg"]
    for words, out in (([], "curves.png"), (["--metric", "val_loss"], "curves.png"), (svg, "there/curves.svg")):
        assert compare(*runs, *words) == "" and capsys.readouterr().out.strip() == out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "there" / "curves.svg").read_text()
    said = ("llcg/version_0", "grappa/version_0", "accuracy", "comm/bytes_sent")
    assert all(words in picture for words in said)


def test_the_first_example_is_short() -> None:
    assert len((EXAMPLES / "node_classification.py").read_text().splitlines()) <= 60


# The examples that turn the folders of other libraries into saved graphs.


def convert(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: Path | str) -> Graph:
    """Run an example, whose last path is where the graph goes."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return Graph.open(arguments[1])


COMMA = {"name": "csv", "delimiter": ","}
FILES = {
    "edges/0.csv": "0,1\n2,0\n",
    "edges/1.csv": "1,1\n",
    "weight/0.txt": "0.5 1\n",
    "weight/1.txt": "2 3\n4 5\n",
    "feat/0.csv": "1,2\n3,4\n",
    "feat/1.csv": "5,6.5\n",
    "mask/0.csv": "1\n0\n",
    "mask/1.csv": "0\n",
}
SAID: dict[str, Any] = {
    "graph_name": "storm",
    "node_type": ["a", "b"],
    "num_nodes_per_chunk": [[2, 1], [2, 0]],
    "edge_type": ["a:to:b"],
    "num_edges_per_chunk": [[2, 1]],
    "edges": {"a:to:b": {"format": COMMA, "data": ["edges/0.csv", "edges/1.csv"]}},
    "node_data": {
        "a": {
            "feat": {"format": COMMA, "data": ["feat/0.csv", "feat/1.csv"]},
            "train_mask": {"format": COMMA, "data": ["mask/0.csv", "mask/1.csv"]},
            "val_mask": {"format": COMMA, "data": ["mask/0.csv", "mask/1.csv"]},
            "kind": {"format": {"name": "parquet"}, "data": ["kind/0.parquet", "kind/1.parquet"]},
            "rows": {"format": {"name": "parquet"}, "data": ["rows.parquet"]},
        },
        "b": {"feat": {"format": {"name": "numpy"}, "data": ["b.npy", "none.npy"]}},
    },
    "edge_data": {"a:to:b": {"feat": {"format": COMMA | {"delimiter": " "}, "data": ["weight/0.txt", "weight/1.txt"]}}},
    "graph_info": {"ntype_label": ["a"], "ntype_label_property": ["kind"]},
}


def write_chunks(folder: Path) -> Path:
    tables: dict[str, Any] = {
        "kind/0.parquet": {"kind": pa.array([1, None], pa.int64())},
        "kind/1.parquet": {"kind": pa.array([0], pa.int64())},
        "rows.parquet": {"value": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])},
    }
    for name, held in (FILES | {"metadata.json": json.dumps(SAID)}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(held)
    (folder / "kind").mkdir()
    for name, columns in tables.items():
        parquet.write_table(pa.table(columns), folder / name)
    np.save(folder / "b.npy", np.arange(4.0).reshape(2, 2)), np.save(folder / "none.npy", np.empty((0, 2)))
    return folder


def test_a_chunked_graph_of_all_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = convert("from_graphstorm", monkeypatch, write_chunks(tmp_path / "storm"), tmp_path / "graph")
    data, mask = HeteroData(), torch.tensor([True, False, False])
    data["a"].x = torch.tensor([[1, 2], [3, 4], [5, 6.5]], dtype=torch.float64)
    data["a"].y, data["a"].train_mask, data["a"].val_mask = torch.tensor([1, -1, 0]), mask, mask.clone()
    data["a"].rows = torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2)
    data["b"].x = torch.arange(4, dtype=torch.float64).view(2, 2)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 2, 1], [1, 0, 1]])
    data["a", "to", "b"].edge_attr = torch.tensor([[0.5, 1], [2, 3], [4, 5]], dtype=torch.float64)
    check_equal(found, Graph.from_pyg(data))
    assert [path.name for path in tmp_path.iterdir() if "arrays" in path.name] == []


PARTS = 3


class Clusters:
    """What PyG's ``ClusterData`` makes, which needs a library that is not here: parts at random, one of them small."""

    def __init__(self, data: Data, num_parts: int, **_: Any) -> None:
        owner = torch.randint(num_parts, (data.num_nodes,), generator=torch.Generator().manual_seed(1))
        self._data, self._nodes = data, owner.argsort()
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), owner.bincount(minlength=num_parts).cumsum(0)])
        place = self._nodes.argsort()
        edges = place[data.edge_index[1]].argsort(stable=True)
        self._ends = place[data.edge_index[:, edges]]
        self._of_part = [(self._ends[1] >= one) & (self._ends[1] < other) for one, other in pairwise(starts)]
        self._starts = starts
        self.partition = SimpleNamespace(node_perm=self._nodes, partptr=starts, edge_perm=edges)

    def __getitem__(self, part: int) -> Data:
        own, nodes = self._of_part[part], self._nodes[self._starts[part] : self._starts[part + 1]]
        edges = self.partition.edge_perm[own]
        out = Data(num_nodes=len(nodes))
        for name, value in self._data.items():
            if name not in ("edge_index", "num_nodes"):
                out[name] = value[nodes if self._data.is_node_attr(name) else edges]
        out.edge_index = torch.stack([self._ends[0, own], self._ends[1, own] - self._starts[part]])
        return out


@pytest.fixture(autouse=True)
def _clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "ClusterData", Clusters)


def one_type() -> Data:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randperm(400, generator=generator)[:90]  # no edge twice
    data = Data(x=torch.randn(20, 3, generator=generator, dtype=torch.float64))
    data.edge_index = torch.stack([keys // 20, keys % 20])
    data.edge_attr = torch.randn(90, 2, generator=generator, dtype=torch.float64)
    return data


def types() -> HeteroData:
    generator, data = torch.Generator().manual_seed(4), HeteroData()
    for kind, count in (("paper", 12), ("author", 7)):
        data[kind].x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    for source, name, target, width in (("author", "writes", "paper", 12), ("paper", "cites", "paper", 12)):
        keys = torch.randperm(len(data[source].x) * width, generator=generator)[:40]
        data[source, name, target].edge_index = torch.stack([keys // width, keys % width])
        data[source, name, target].edge_attr = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    return data


def types_in_time() -> HeteroData:
    data = types()
    for kind in data.edge_types:
        data[kind].edge_time = torch.arange(40) * 7 % 11
    return data


@pytest.mark.parametrize(("make", "time"), [(one_type, []), (types, []), (types_in_time, ["--time", "edge_time"])])
def test_parts_of_pyg_are_the_graph_that_was_partitioned(make, time, tmp_path, monkeypatch) -> None:
    data = make()
    Partitioner(data, PARTS, str(tmp_path / "parts")).generate_partition()
    found = convert("from_pyg_partitions", monkeypatch, tmp_path / "parts", tmp_path / "graph", *time)
    for kind in data.node_types if isinstance(data, HeteroData) else [None]:
        file = tmp_path / "parts" / ("node_map.pt" if kind is None else f"node_map/{kind}.pt")
        (data if kind is None else data[kind]).part = torch.load(file)
    check_equal(found, Graph.from_pyg(data, time=time[1] if time else None))


@pytest.mark.parametrize("name", ["from_graphstorm", "from_pyg_partitions"])
def test_a_script_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 80
