"""What users get wrong about graphs with types and times: each is refused by one sentence that says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.shards.one_shard import OneShard
from tests.graph.typed.graphs import small

CITES, WRITES, BY = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author")


def data_with(**arrays: Any) -> HeteroData:
    """The small graph with arrays of papers; those of citations begin with ``cites_``."""
    data = small()
    del data["author"].train_mask
    for name, array in arrays.items():
        data[CITES if name.startswith("cites_") else "paper"][name.removeprefix("cites_")] = array
    return data


def links_apart() -> lgd.Graph:
    """Authors write papers, and others get answers: no pair of the one type is one of the other, turned round."""
    data = data_with()
    data[WRITES].edge_index, data[WRITES].edge_attr = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]]), torch.ones(4, 2)
    data[BY].edge_index = torch.tensor([[4, 5, 6], [4, 5, 6]])
    return lgd.Graph.from_pyg(data)


def by_time(**arrays: Any) -> lgd.PartitionedDataModule:
    return lgd.PartitionedDataModule(
        lgd.Graph.from_pyg(data_with(**arrays)), sampler=lgd.TemporalSampler([2], "time", "at")
    )


SECONDS = 1_700_000_000 + torch.arange(12)
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
    "seeds in seconds, events in milliseconds": (
        lambda: by_time(at=SECONDS, time=SECONDS * 1000, cites_time=torch.full((40,), 1_700_000_000_000)),
        r"No seed sees an event: the latest seed is at 1700000011 \(at\), and the earliest event at 1700000000000 "
        r"\(time\)\. Give both in one unit",
    ),
    "a split by times of two types": (
        lambda: lgd.split_by_time(lgd.Graph.from_pyg(_of_two_types())),
        r"2 node types have labels and 'time' \(\['paper', 'author'\]\), and one is split: choose it, as in .*'paper'",
    ),
    "a reverse type that is none": (
        lambda: lgd.split_edges(links_apart(), edge_type=WRITES, val=0.25, test=0.25, reverse=BY),
        r"reverse=\('paper', 'by', 'author'\) has none of the links of .* turned round: name the type that has them",
    ),
}


def _of_two_types() -> HeteroData:
    data = data_with()
    data["author"].y, data["author"].time = torch.zeros(7).long(), torch.arange(7)
    return data


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


def test_seeds_that_see_everything_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightning_gnn_dist.extensions.temporal.temporal_sampler.rank_zero_info", told.append)
    by_time(at=torch.full((12,), 90), time=torch.arange(12), cites_time=torch.arange(40))
    assert told[-1] == (
        "All seeds see all events: the earliest seed is at 90 (at), and the last event at 39 (time). If that cannot "
        "be, their units differ."
    )


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        (1000, "No seed sees edges of these types, by their time: paper__cites__paper (1700000000000 to 170000003900"),
        (1, None),
        (1e-3, "Every seed sees all edges of these types, by their time: paper__cites__paper (1700000 to 1700000)."),
    ],
)
def test_a_type_of_edges_in_another_unit_is_told(
    monkeypatch: pytest.MonkeyPatch, unit: float, said: str | None
) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightning_gnn_dist.extensions.temporal.temporal_sampler.rank_zero_info", told.append)
    of_cites = ((1_700_000_000 + torch.arange(40)) * unit).long()
    data = data_with(time=SECONDS, cites_time=of_cites)
    data[WRITES].time = 1_700_000_000 + torch.arange(data[WRITES].num_edges) % 12
    lgd.PartitionedDataModule(lgd.Graph.from_pyg(data), sampler=lgd.TemporalSampler([2], "time"))
    about = [line for line in told if "units differ" in line]
    assert len(about) == (said is not None) and (said is None or about[0].startswith(said))
    if said is not None:
        assert "Seeds are at 1700000000 to 1700000011. If that cannot be, their units differ: give" in about[0]


def test_links_of_a_split_are_compared_with_other_edges_by_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightning_gnn_dist.extensions.temporal.temporal_sampler.rank_zero_info", told.append)
    data = data_with(cites_time=1_700_000_000_000 + torch.arange(40))
    data[WRITES].time = 1_700_000_000 + torch.arange(data[WRITES].num_edges)
    split = lgd.split_edges(lgd.Graph.from_pyg(data), edge_type=WRITES, val=0.25, test=0.25, time="time")
    lgd.LinkDataModule(split)
    assert any(line.startswith("No seed sees edges of these types, by their time: paper__cites") for line in told)


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


@pytest.mark.parametrize("how", [(), ("--shard", "0", "--num-shards", "2")], ids=str)
@pytest.mark.parametrize(("changes", "options", "message"), OF_TABLES.values(), ids=OF_TABLES)
def test_mistakes_in_tables(
    changes: dict[str, str | None], options: tuple[str, ...], message: str, how: tuple[str, ...], tmp_path: Path
) -> None:
    for name, text in (TABLES | changes).items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (tmp_path / "source" / name).write_text(text)
    with pytest.raises(SystemExit, match=message) as stop:
        main(["prepare", str(tmp_path / "source"), str(tmp_path / "out"), *how, *options])
    check_sentences(str(stop.value))
    assert not (tmp_path / "out" / "share-00000").exists() and not (tmp_path / "out" / "meta.json").exists()


def test_shards_count_from_0() -> None:
    with pytest.raises(ValueError, match=r"index must be below 2, the number of shards, got 2: they count from 0\."):
        OneShard(2, 2)
