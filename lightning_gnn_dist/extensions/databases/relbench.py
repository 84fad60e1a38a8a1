"""RelBench's objects in memory as a folder in its layout, without RelBench: they are known by their attributes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from lightning_gnn_dist.checks import check_folder, shown
from lightning_gnn_dist.extensions.databases.manifest import RECOMMENDATION, RELBENCH, TASK_TYPES
from lightning_gnn_dist.prepare.arrays import SPLITS
from lightning_gnn_dist.prepare.engine import duckdb_for

_OF_TABLE = ("df", "pkey_col", "fkey_col_to_pkey_table", "time_col")
_OF_ENTITIES = ("entity_table", "entity_col", "target_col", "time_col")
_OF_PAIRS = ("src_entity_table", "src_entity_col", "dst_entity_table", "dst_entity_col", "eval_k", "time_col")


def write_relbench(dataset: Any, path: str | Path, tasks: Mapping[str, Any]) -> None:
    """Write a data set of RelBench, or one that looks like it, as the folder that ``prepare`` reads.

        dataset = relbench.load_dataset("rel-hm")
        write_relbench(dataset, "rel_hm", {"user-churn": dataset.load_task("user-churn")})
        prepare_graph("rel_hm", "rel_hm_graph")

    Rows after ``test_timestamp`` are written, too: no question sees what is later than it.

    Args:
        dataset: Has ``get_db()``, ``val_timestamp`` and ``test_timestamp``; what it returns has a ``table_dict`` of
            tables with ``df``, ``pkey_col``, ``fkey_col_to_pkey_table`` and ``time_col``.
        path: The folder, which must not exist.
        tasks: Its tasks by name, of entities or of recommendations, each with ``get_table(split)``.
    """
    _check_has("dataset", dataset, ("get_db", "val_timestamp", "test_timestamp"), "RelBench's Dataset")
    folder = check_folder("path", path)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: choose another path.")
    abouts = {name: _about_task(f"tasks[{name!r}]", task) for name, task in tasks.items()}
    tables = getattr(dataset.get_db(upto_test_timestamp=False), "table_dict", None)
    if not isinstance(tables, Mapping) or not tables:
        raise TypeError(
            f"dataset.get_db() must return RelBench's Database, which has a table_dict, got {tables!r:.80}."
        )
    for name, table in tables.items():
        _check_has(f"table {name!r}", table, _OF_TABLE, "RelBench's Table")
        _write(table.df, folder / "db" / f"{name}.parquet")
    moments = {name: str(getattr(dataset, name)) for name in ("val_timestamp", "test_timestamp")}
    _say(folder, {"name": folder.name, **moments, "tables": {name: _about(table) for name, table in tables.items()}})
    for name, task in tasks.items():
        for split in SPLITS:
            _write(task.get_table(split, mask_input_cols=False).df, folder / "tasks" / name / f"{split}.parquet")
        _say(folder / "tasks" / name, {"name": name, **abouts[name]})


def _about(table: Any) -> dict[str, Any]:
    return {"pkey": table.pkey_col, "time_col": table.time_col, "fkeys": dict(table.fkey_col_to_pkey_table)}


def _about_task(where: str, task: Any) -> dict[str, Any]:
    """What a manifest says of a task."""
    _check_has(where, task, ("task_type", "get_table"), "RelBench's EntityTask or RecommendationTask")
    kind = getattr(task.task_type, "value", task.task_type)
    if kind not in TASK_TYPES:
        raise ValueError(f"{where}: task_type must be one of {shown(list(TASK_TYPES))}, got {shown(kind)}.")
    words = _OF_PAIRS if kind == RECOMMENDATION else _OF_ENTITIES
    _check_has(where, task, words, f"a task of RelBench of the type {kind}")
    hidden = task.hidden_columns() if hasattr(task, "hidden_columns") else ()
    about = {word: getattr(task, word) for word in words}
    return {"task_type": kind, **about, "remove_columns": [list(pair) for pair in hidden]}


def _check_has(where: str, given: Any, words: tuple[str, ...], what: str) -> None:
    if missing := [word for word in words if not hasattr(given, word)]:
        raise TypeError(f"{where} must be {what}, and a {type(given).__name__} has no {missing[0]}.")


def _write(frame: Any, path: Path) -> None:
    """Write a table of pandas or of pyarrow."""
    duckdb_for()
    import pyarrow as pa
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        table = frame if isinstance(frame, pa.Table) else pa.Table.from_pandas(frame, preserve_index=False)
        parquet.write_table(table, path)
    except (pa.ArrowException, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path.stem} cannot be written as Parquet ({error}): give a DataFrame whose columns have one type each."
        ) from error


def _say(folder: Path, about: Mapping[str, Any]) -> None:
    (folder / RELBENCH).write_text(yaml.safe_dump(dict(about), sort_keys=False), encoding="utf-8")
