"""What works with what, tried cell by cell: ``python -m tests.combinations`` writes docs/combinations.md anew.

A new value is a line here: in BOUNDARIES, RESIDENCIES, SAMPLERS or STRATEGIES.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.boundary.boundary import Boundary, short_name
from lightning_gnn_dist.checks import brief
from lightning_gnn_dist.homes.residency import Residency
from lightning_gnn_dist.sampling.base import Sampler
from tests.boundary.models import Model, weighted_data
from tests.data_fitting import trainer
from tests.every_strategy import every_strategy
from tests.layers.models import graph_of
from tests.ranks import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
RANKS = 3  # with fewer, Rotate() changes nothing
WORKS = "yes"
BOUNDARIES: list[Boundary] = [
    lgd.Isolated(),
    lgd.Halo(1),
    lgd.Halo(2),
    lgd.Auto(),
    lgd.Exchange(),
    lgd.Exchange(every=2, overlap=True, share=0.5),
    lgd.History(),
    lgd.Fetch(),
]
RESIDENCIES: list[Residency] = [lgd.Fixed(), lgd.Rotate(), lgd.Redeal(6), lgd.Sweep(chunks=1, of=6)]
SAMPLERS: list[Sampler] = [
    lgd.NeighborSampler([3, 3]),
    lgd.LadiesSampler([8, 8]),
    lgd.ShadowSampler([3], num_hops=2),
    lgd.WholePartSampler(2),
    lgd.TemporalSampler([3, 3], "y"),  # labels are times like any numbers
]
STRATEGIES: dict[str, Callable[[], Any]] = {**every_strategy(1), "ddp": lambda: "ddp"}
SECTIONS = {"A graph that every host has, in RAM or in files": ("RAM", "files"), "Shards": ("shards",)}


@dataclass(frozen=True)
class Cell:
    """One combination, by the names of the tables."""

    store: str
    boundary: str
    residency: str
    sampler: str
    strategy: str

    def data(self, folder: Path) -> Any:
        boundary, residency, sampler = VALUES[0][self.boundary], VALUES[1][self.residency], VALUES[2][self.sampler]
        shared: dict[str, Any] = {"sampler": sampler, "batch_size": 64, "boundary": boundary}
        if self.store == "shards":
            return lgd.PartitionedDataModule(folder / "shards", **shared)
        graph = whole_graph() if self.store == "RAM" else lgd.Graph.open(folder / "graph")
        every = 1 if isinstance(residency, lgd.Rotate | lgd.Redeal) else None
        holding = lgd.Holding(residency, every, cache_dir=folder / "cache")
        cutter = lgd.RandomPartitioner()
        return lgd.PartitionedDataModule(graph, partitioner=cutter, holding=holding, **shared)


def _named(values: Sequence[Any]) -> dict[str, Any]:
    """Values by their class; boundaries, of which there are several of a class, as they are written."""
    return {short_name(value) if isinstance(value, Boundary) else type(value).__name__: value for value in values}


VALUES = tuple(map(_named, (BOUNDARIES, RESIDENCIES, SAMPLERS)))
CELLS = [
    Cell(store, *values)
    for stores in SECTIONS.values()
    for store in stores
    for values in product(*VALUES, STRATEGIES)
    if store != "shards" or values[1] == "Fixed"  # shards are for good
]


class Layered(Model):
    """Defined by its layers, each of which takes edges as they are. Counts its steps."""

    def __init__(self) -> None:
        super().__init__(SAGEConv, 2)
        self.steps = 0

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        return self._between(conv, conv(batch.x, batch.edge_index)[: batch.batch_size])

    def training_step(self, batch: Any) -> Tensor:
        self.steps += 1
        return super().training_step(batch)


def whole_graph() -> lgd.Graph:
    return graph_of(weighted_data(48))


def try_out(cells: Sequence[Cell], timeout: float) -> dict[Cell, str]:
    """For each cell that it works, or why it does not begin: on all ranks alike."""
    with tempfile.TemporaryDirectory() as name:
        graph, folder = whole_graph(), Path(name)
        graph.save(folder / "graph")
        lgd.save_shards(graph, lgd.RandomPartitioner()(graph, RANKS, 0), folder / "shards")
        by_rank = run_ranks(tried, RANKS, folder, cells, timeout=timeout)
    for cell, *said in zip(cells, *by_rank, strict=True):
        assert len(set(said)) == 1, f"{cell}: the ranks say {said}"
    return dict(zip(cells, by_rank[0], strict=True))


def tried(rank: int, world_size: int, folder: Path, cells: Sequence[Cell]) -> list[str]:
    return [_tried(cell, world_size, folder) for cell in cells]


def _tried(cell: Cell, world_size: int, folder: Path) -> str:
    module, strategy = Layered().double(), STRATEGIES[cell.strategy]()
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0, "precision": "64-true"}
    said = WORKS
    try:
        trainer(world_size, strategy, **options).fit(module, cell.data(folder))
    except (ValueError, TypeError) as error:  # all else is no refusal
        said = _for_all(str(error), cell, strategy)
    assert (said == WORKS) == bool(module.steps), f"{cell}, after {module.steps} steps: {said}"
    return said


def _for_all(said: str, cell: Cell, strategy: Any) -> str:
    """A reason as it holds for all values that are refused for it."""
    for value in (VALUES[0][cell.boundary], VALUES[2][cell.sampler]):
        said = said.replace(f"got {value}", "got another")
    if said.startswith(cell.residency):
        said = said.replace(f"boundary={brief(VALUES[0][cell.boundary])}", "this boundary")
    if isinstance(strategy, str):
        return said
    name = type(strategy).__name__
    return said.replace(f"which {name}", "which this strategy").replace(name, "This strategy")


# The page.

Place = tuple[str, ...]
Rows = dict[tuple[Place, Place, Place], tuple[str, ...]]
JOINED = " · "
EVERY = "any"


def written(found: dict[Cell, str]) -> str:
    """The tables, and the reasons below them."""
    reasons = [said for said in dict.fromkeys(found.values()) if said != WORKS]
    marks = {WORKS: WORKS} | {said: f"({number})" for number, said in enumerate(reasons, 1)}
    lines = []
    for title, stores in SECTIONS.items():
        first, *others = [_rows(store, found) for store in stores]
        assert all(other == first for other in others), f"{title}: results depend on where the graph is"
        lines += [f"## {title}", "", _line(["boundary", "residency", "sampler", *STRATEGIES])]
        lines += [_line(["---"] * (3 + len(STRATEGIES)))]
        lines += [_line([*_labels(places), *map(marks.__getitem__, row)]) for places, row in first.items()]
        lines += [""]
    return "\n".join([*lines, "## Why not", "", *(f"{number}. {said}" for number, said in enumerate(reasons, 1)), ""])


def read(page: str) -> dict[Cell, str]:
    """What the tables of a page say of each cell."""
    tables, _, listed = page.partition("## Why not\n")
    reasons = {f"({number})": said for number, _, said in (line.partition(". ") for line in listed.split("\n") if line)}
    found = {}
    for title, stores in SECTIONS.items():
        _, _, below = tables.partition(f"## {title}\n")
        lines = [line[2:-2].split(" | ") for line in below.partition("\n## ")[0].splitlines() if line.startswith("| ")]
        for (*labels,) in lines[2:]:
            places = [
                list(values) if label == EVERY else label.split(JOINED)
                for label, values in zip(labels, VALUES, strict=False)
            ]
            for strategy, said in zip(STRATEGIES, labels[3:], strict=True):
                cells = (Cell(store, *place, strategy) for store in stores for place in product(*places))  # type: ignore[call-arg]
                found |= {cell: reasons.get(said, said) for cell in cells}
    return found


def _rows(store: str, found: dict[Cell, str]) -> Rows:
    """What strategies say of boundary, residency and sampler: one row for all neighbours of which they say alike."""
    rows: Rows = {}
    for cell in found:
        if cell.store == store:
            place = ((cell.boundary,), (cell.residency,), (cell.sampler,))
            rows[place] = tuple(
                found[Cell(store, cell.boundary, cell.residency, cell.sampler, name)] for name in STRATEGIES
            )
    for axis in (2, 1, 0):
        alike: dict[Any, list[str]] = {}
        for places, row in rows.items():
            alike.setdefault((places[:axis], places[axis + 1 :], row), []).extend(places[axis])
        rows = {(*before, tuple(names), *after): row for (before, after, row), names in alike.items()}  # type: ignore[misc]
    return rows


def _labels(places: Sequence[Place]) -> list[str]:
    return [
        EVERY if len(names) == len(values) else JOINED.join(names) for names, values in zip(places, VALUES, strict=True)
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def parts_of_page() -> tuple[str, str]:
    """What is written by hand, and what is written anew."""
    above, title, below = PAGE.read_text().partition(f"## {next(iter(SECTIONS))}\n")
    return above, title + below


if __name__ == "__main__":
    tables = written(try_out(CELLS, timeout=1800))
    PAGE.write_text(parts_of_page()[0] + tables)
