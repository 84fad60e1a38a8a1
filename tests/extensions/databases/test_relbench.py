"""Objects that look like RelBench's become the folder that it would have written, and the same graph."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.extensions.databases.relbench import write_relbench
from tests.extensions.databases.folders import FILES, MANIFEST, as_relbench, write
from tests.extensions.databases.test_database import BUYS

parquet = pytest.importorskip("pyarrow.parquet")


def objects_of(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The data set and the tasks in RelBench's layout, as objects with its attributes."""
    said = yaml.safe_load(MANIFEST)
    tables = {
        name: SimpleNamespace(
            df=parquet.read_table(folder / "db" / f"{name}.parquet"),
            pkey_col=spec["pkey"],
            time_col=spec.get("time_col"),
            fkey_col_to_pkey_table=spec.get("fkeys", {}),
        )
        for name, spec in said["tables"].items()
    }
    moments = {name: said[name] for name in ("val_timestamp", "test_timestamp")}
    dataset = SimpleNamespace(**moments, get_db=lambda upto_test_timestamp: SimpleNamespace(table_dict=tables))
    tasks = {}
    for file in folder.glob("tasks/*/manifest.yaml"):
        about = yaml.safe_load(file.read_text())
        hidden = about.pop("remove_columns", [])

        def get_table(split: str, mask_input_cols: bool, folder: Path = file.parent) -> Any:
            assert not mask_input_cols
            return SimpleNamespace(df=parquet.read_table(folder / f"{split}.parquet"))

        kind = SimpleNamespace(value=about.pop("task_type"))
        tasks[file.parent.name] = SimpleNamespace(
            **about, task_type=kind, get_table=get_table, hidden_columns=lambda hidden=hidden: hidden
        )
    return dataset, tasks


def test_they_are_the_graph_of_the_folder(tmp_path: Path) -> None:
    import pyarrow as pa

    folder = as_relbench(write(tmp_path / "plain", FILES), tmp_path / "relbench")
    stays = folder / "tasks" / "stays" / "manifest.yaml"
    stays.write_text(stays.read_text() + "remove_columns: [[order, price]]\n")
    write(folder, {"tasks/buys/manifest.yaml": BUYS})
    for split in ("train", "val", "test"):
        asked = parquet.read_table(folder / f"tasks/stays/{split}.parquet").select(["who", "at"])
        answers = pa.array([[11 + row, 13] for row in range(len(asked))])
        parquet.write_table(asked.append_column("what", answers), folder / f"tasks/buys/{split}.parquet")
    manifest = folder / "manifest.yaml"
    manifest.write_text(manifest.read_text().replace(", columns: {note: text}", ""))
    write_relbench(objects_of(folder)[0], tmp_path / "written", objects_of(folder)[1])
    for name in ("relbench", "written"):
        prepare_graph(tmp_path / name, tmp_path / f"{name}_graph")
    one, two = (Graph.open(tmp_path / f"{name}_graph") for name in ("relbench", "written"))
    assert one.types.tables == two.types.tables and one.types.tables is not None
    assert one.types.tables.tasks.keys() == {"stays", "buys"} and one.arrays.keys() == two.arrays.keys()
    assert all(torch.equal(array, two.arrays[name]) for name, array in one.arrays.items())


def test_other_objects_are_refused(tmp_path: Path) -> None:
    dataset, tasks = objects_of(as_relbench(write(tmp_path / "plain", FILES), tmp_path / "relbench"))
    out = tmp_path / "out"
    with pytest.raises(TypeError, match="dataset must be RelBench's Dataset, and a dict has no get_db"):
        write_relbench({}, out, tasks)
    with pytest.raises(TypeError, match=r"tasks\['stays'\] must be RelBench's EntityTask or .*, and a str has no"):
        write_relbench(dataset, out, {"stays": "stays"})
    bad = SimpleNamespace(**vars(tasks["stays"]) | {"task_type": "ranking"})
    with pytest.raises(ValueError, match=r"task_type must be one of .*, got 'ranking'"):
        write_relbench(dataset, out, {"stays": bad})
    del tasks["stays"].entity_col
    with pytest.raises(TypeError, match=r"of the type binary_classification, and a SimpleNamespace has no entity_col"):
        write_relbench(dataset, out, tasks)
    dataset.get_db(False).table_dict["order"].df = [1]
    with pytest.raises(ValueError, match="order cannot be written as Parquet"):
        write_relbench(dataset, out, {})
    with pytest.raises(FileExistsError, match="choose another path"):
        write_relbench(dataset, tmp_path, {})
