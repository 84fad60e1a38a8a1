"""What graphs are prepared from, with types and without: tables as text and in Parquet, and arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NODES, EDGES = 300, 1600
COUNTS = {"author": 70, "paper": 120, "venue": 6}
Table = dict[str, list[Any]]


def write(table: Table, path: Path) -> None:
    """As text, or in Parquet if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table(table), path, row_group_size=50)
        return
    rows = zip(*table.values(), strict=True)
    lines = [",".join(table), *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def plain_tables(*, has_words: bool) -> tuple[Table, Table]:
    """Edges with weights, and nodes in order of their ids, with labels in words or numbers, splits and features."""
    draw = np.random.default_rng(0)
    ends = draw.integers(0, NODES, (2, EDGES))
    edges = {"source": ends[0].tolist(), "target": ends[1].tolist(), "weight": draw.integers(1, 99, EDGES).tolist()}
    nodes: Table = {"id": list(range(NODES)), "label": draw.choice(list("pqr") if has_words else 3, NODES).tolist()}
    nodes["split"] = [("train", "val", "test", "train")[number % 4] for number in range(NODES)]
    nodes |= {"height": (draw.integers(0, 999, NODES) / 8).tolist(), "width": draw.integers(0, 9, NODES).tolist()}
    return edges, nodes


def plain_arrays(folder: Path) -> Path:
    """As a data set's own files, with features in half precision and lists of nodes."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(1)
    np.save(folder / "edge_index.npy", draw.integers(0, NODES, (2, EDGES)))
    np.save(folder / "edge_weight.npy", draw.random(EDGES).astype(np.float32))
    np.save(folder / "x.npy", draw.normal(size=(NODES, 7)).astype(np.float16))
    np.save(folder / "y.npy", draw.integers(0, 5, (NODES, 1)))
    np.save(folder / "train_idx.npy", draw.permutation(NODES)[:90])
    return folder


def archive(folder: Path, path: Path) -> Path:
    np.savez(path, **{file.stem: np.load(file) for file in sorted(folder.glob("*.npy"))})
    return path


def typed_tables(folder: Path, suffix: str) -> Path:
    """Ids of all kinds, labels in words, splits, times and weights; one type without a table, in arrays."""
    draw, count = np.random.default_rng(2), COUNTS["paper"]
    papers = draw.permutation(900)[:count] + 100
    authors = [f"author {n * 7}" for n in range(COUNTS["author"])]
    paper: Table = {"id": papers.tolist(), "label": draw.choice(list("pqr"), count).tolist()}
    paper["split"] = [("train", "val", "test")[n % 3] for n in range(count)]
    paper |= {"year": draw.integers(0, 30, count).tolist(), "pages": draw.integers(1, 50, count).tolist()}
    paper["words"] = (draw.integers(0, 99, count) / 4).tolist()
    write(paper, folder / "nodes" / f"paper{suffix}")
    write({"name": authors, "age": draw.integers(20, 90, len(authors)).tolist()}, folder / "nodes" / f"author{suffix}")
    (folder / "nodes" / "venue").mkdir()
    np.save(folder / "nodes" / "venue" / "num_nodes.npy", np.array(COUNTS["venue"]))
    written: Table = {"source": draw.choice(authors, 500).tolist(), "target": draw.choice(papers, 500).tolist()}
    written |= {"share": (draw.integers(0, 64, 500) / 64).tolist(), "year": draw.integers(0, 30, 500).tolist()}
    write(written, folder / "edges" / f"author__writes__paper{suffix}")
    cites: Table = {"old": draw.choice(papers, 600).tolist(), "new": draw.choice(papers, 600).tolist()}
    write(cites | {"year": draw.integers(0, 30, 600).tolist()}, folder / "edges" / f"paper__cites__paper{suffix}")
    at: Table = {"paper": papers.tolist(), "venue": draw.integers(0, COUNTS["venue"], count).tolist()}
    write(at, folder / "edges" / f"paper__at__venue{suffix}")
    return folder


def assignment(folder: Path, counts: dict[str, int], parts: int) -> Path:
    """The part of each node, of each type in a file of its own."""
    draw = np.random.default_rng(3)
    folder.mkdir(parents=True)
    for kind, count in counts.items():
        np.save(folder / f"{kind}.npy", draw.integers(0, parts, count))
    return folder
