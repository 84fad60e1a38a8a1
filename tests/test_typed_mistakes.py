"""What users get wrong about graphs with types: each is refused by one sentence that says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.main import main
from tests.graph.typed.graphs import small

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


def data_with(**arrays: Any) -> HeteroData:
    """The small graph with arrays of papers; those of citations begin with ``cites_``."""
    data = small()
    del data["author"].train_mask
    for name, array in arrays.items():
        data[CITES if name.startswith("cites_") else "paper"][name.removeprefix("cites_")] = array
    return data


OF_GRAPHS: dict[str, tuple[Callable[[], Any], str]] = {
    "times in words": (
        lambda: lgd.Graph.from_pyg(data_with(time=["monday"] * 12), time="time"),
        r"data\['paper'\]\.time must be a tensor of one number or row for each node, or each edge, got \['monday'",
    ),
    "times in words, of one type, which no call has named": (
        lambda: lgd.Graph.from_pyg(data_with(time=torch.arange(12), cites_time=["2099-01-01"] * 40)),
        r"data\['paper', 'cites', 'paper'\]\.time must be a tensor .*2099.*Turn its words into numbers, or remove it",
    ),
    "times as dates": (
        lambda: lgd.Graph.from_pyg(data_with(time=np.zeros(12, "datetime64[s]")), time="time"),
        r"got a numpy array of datetime64\[s\] .*astype\('int64'\)",
    ),
}


@pytest.mark.parametrize(("act", "message"), OF_GRAPHS.values(), ids=OF_GRAPHS)
def test_mistakes_about_graphs(act: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as stop:
        act()
    check_sentences(str(stop.value))


def check_sentences(said: str) -> None:
    """One sentence, or a line for each mistake below one that ends in a colon."""
    first, *others = said.split("\n")
    assert first.endswith(":" if others else (".", "...", "?"))
    assert all(line.endswith((".", "...", "?")) for line in others)


TABLES = {
    "nodes/a.csv": "id,v\n1,2\n2,3\n",
    "nodes/b.csv": "id,v\nx,2\ny,3\n",
    "edges/a__to__b.csv": "source,target\n1,x\n2,y\n",
}
OF_TABLES: dict[str, tuple[dict[str, str | None], tuple[str, ...], str]] = {
    "edges of an unknown type": (
        {"edges/a__to__c.csv": "source,target\n1,x\n"},
        (),
        r"a__to__c\.csv names the node type 'c', and .*nodes has \['a', 'b'\]: add a table of it, c\.csv, or",
    ),
    "an id is missing": (
        {"nodes/b.csv": "id,v\nx,2\n,3\n"},
        (),
        r"nodes/b\.csv: column 'id' is empty in row 2, and every node has an id: fill it, or remove the row",
    ),
    "a table of nodes apart": ({}, ("--nodes", "nodes.csv"), r"their nodes are known \(no --nodes\)"),
}


@pytest.mark.parametrize(("changes", "options", "message"), OF_TABLES.values(), ids=OF_TABLES)
def test_mistakes_in_tables(
    changes: dict[str, str | None], options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    check_tables(changes, options, message, tmp_path)


def check_tables(
    changes: dict[str, str | None], options: tuple[str, ...], message: str, tmp_path: Path, *how: str
) -> None:
    for name, text in (TABLES | changes).items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (tmp_path / "source" / name).write_text(text)
    with pytest.raises(SystemExit, match=message) as stop:
        main(["prepare", str(tmp_path / "source"), str(tmp_path / "out"), *how, *options])
    check_sentences(str(stop.value))
    assert not (tmp_path / "out" / "share-00000").exists() and not (tmp_path / "out" / "meta.json").exists()
