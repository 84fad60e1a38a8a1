"""What boundaries cost, against parts that are read and edges that are counted one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_gnn_dist import Coverage, Exchange, Fixed, Graph, Halo, History, Holding, Isolated, Partition
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.boundary.prices import prices, short_name
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.homes.part_reader import PartReader
from tests.boundary.models import weighted_data
from tests.boundary.test_exchange import rows_moved
from tests.boundary.test_history_rules import rows_moved as rows_of_meetings
from tests.layers.models import graph_of

PARTS = 3


def cut_graph() -> tuple[Graph, Partition]:
    graph = graph_of(weighted_data())
    owner = torch.randint(PARTS, (graph.num_nodes,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    owner[:40] = 0
    return graph, Partition(owner, PARTS)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_halos_cost_what_parts_with_them_take(num_layers: int) -> None:
    graph, partition = cut_graph()
    found = list(prices(graph, partition, partition.report(graph), num_layers, 5))
    some = [Exchange(share=0.1), Exchange(every=5)]
    exchanges = [History(), *some, Exchange(8), Exchange(16), Exchange(overlap=True)] if num_layers > 1 else []
    expected: list[Boundary] = [Isolated(), *map(Halo, range(1, num_layers + 1)), *exchanges, Exchange()]
    assert [price.boundary for price in found] == expected
    kept = rows_of_meetings(weighted_data(), partition.assignment.tolist(), num_layers)[1]
    for price in found:
        settings = PARTS, 0, price.boundary, Coverage()
        readers = [PartReader(graph, partition, Holding(Fixed()), rank, *settings) for rank in range(PARTS)]
        parts = [reader.read(0).graph for reader in readers]
        own = partition.counts().tolist()
        assert price.rows == max(part.num_nodes - count for part, count in zip(parts, own, strict=True))
        more = max(kept) * 5 * 4 if isinstance(price.boundary, History) else 0
        assert price.bytes_held == max(part.num_bytes for part in parts) + more
        assert price.bytes_sent == 0 or isinstance(price.boundary, Exchange | History)
        assert (price.per == "round") == isinstance(price.boundary, History)


def test_a_halo_is_exact_where_the_next_hop_is_empty() -> None:
    graph = Graph.from_edge_index(torch.tensor([[1, 2, 3], [0, 1, 2]]), 4)  # 3 -> 2 -> 1 -> 0
    partition = Partition(torch.tensor([0, 1, 1, 0], dtype=torch.int32), 2)
    found = prices(graph, partition, partition.report(graph), 5, 4)
    loses = {str(short_name(price.boundary)): price.loses for price in found}
    # Part 0 holds 0 and 3: node 1 is one hop away, 2 is two; 2 receives from 3 with a halo of three hops only.
    assert list(loses)[1:4] == ["Halo(1)", "Halo(2)", "Halo(3)"]
    assert [loses[f"Halo({hops})"] == "nothing" for hops in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize("num_layers", [2, 3])
def test_exchanges_and_meetings_cost_their_rows(num_layers: int) -> None:
    graph, partition = cut_graph()
    owner = partition.assignment.tolist()
    *_, history, some, old, eight, sixteen, late, exact = prices(
        graph, partition, partition.report(graph), num_layers, 5
    )
    moved, drawn = (max(rows_moved(weighted_data(), owner, num_layers, PARTS, share)) for share in (1.0, 0.1))
    assert [price.bytes_sent for price in (eight, sixteen, late, exact)] == [moved * n for n in (13, 10, 20, 20)]
    assert [price.bytes_sent for price in (some, old)] == [drawn * 20, moved * 4]
    sent, _ = rows_of_meetings(weighted_data(), owner, num_layers)
    assert history.bytes_sent == max(sent) * 20


def test_inspect_prints_the_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_graph()[0].save(tmp_path / "graph")
    more = ["--partitioner", "random", "--layers", "2", "--width", "8", "--bandwidth", "0.5"]
    main(["inspect", str(tmp_path / "graph"), "--parts", "3", *more])
    said = capsys.readouterr().out
    lines = said[said.index("The edges between parts, for 2 layers of width 8 and 0.5 Gbit/s") :].splitlines()[2:13]
    assert lines.pop().startswith('boundary="auto" is Halo(2): 3 ranks on this host have room for parts of')
    assert [line.split()[0] for line in lines] == [
        "Isolated()",
        "Halo(1)",
        "Halo(2)",
        "History()",
        "Exchange(share=0.1)",
        "Exchange(every=5)",
        "Exchange(bits=8)",
        "Exchange(bits=16)",
        "Exchange(overlap=True)",
        "Exchange()",
    ]
    of_exchanges = ["step", "steps", "wire", "wire", "step", "nothing"]
    assert [line.split()[-1] for line in lines] == ["edges", "away", "nothing", "round", *of_exchanges]
