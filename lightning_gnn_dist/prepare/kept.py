"""What a prepared graph keeps of the tables that it was made of, beside its arrays: ids, and words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lightning_gnn_dist.checks import check_path
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.user_ids import CLASSES, OWN, ids_file

CATEGORIES = ".categories"  # suffix of a file beside the ids of a type


def category_names(path: str | Path, node_type: str = "") -> dict[str, list[str]]:
    """Return the words of each column of ``categories``, of which the first is 1, as 0 is none of them.

    Args:
        path: A graph that :func:`prepare_graph` has made of tables.
        node_type: The type of the nodes, of a graph with types.
    """
    file = ids_file(check_path("path", path), node_type).with_suffix(CATEGORIES)
    found: dict[str, list[str]] = json.loads(file.read_text()) if file.exists() else {}
    return found


def keep_ids(ids: Path, folder: Path, node_type: str) -> None:
    """Copy into the folder of a saved graph a file of ids, and what lies beside it.

    That is ``classes.npy``, the names of labels that were words, ``categories.json``, those of columns, and ``own``, a
    folder with the columns that say what a row of a table of questions is.
    """
    file = ids_file(folder, node_type)
    file.parent.mkdir(exist_ok=True)
    kept = {ids: file, ids.with_name("classes.npy"): file.with_suffix(CLASSES)}
    kept[ids.with_name("categories.json")] = file.with_suffix(CATEGORIES)
    kept |= {own: file.with_suffix(OWN) / own.name for own in (ids.parent / "own").glob("*.npy")}
    for source, target in kept.items():
        if source.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
            flush(target)
