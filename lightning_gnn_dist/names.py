"""The names by which the core asks for what it does not import: extensions, and what few fits need of the core."""

from __future__ import annotations

from importlib.machinery import PathFinder
from os.path import dirname
from pkgutil import resolve_name
from typing import Any

FOLDER = "lightning_gnn_dist.extensions."
EXTENSIONS = {  # what a user asks for by something else than its class, such as a layer of torch
    "by time": "lightning_gnn_dist.extensions.temporal.temporal_sampler:TemporalSampler",
    "layers of PyG": "lightning_gnn_dist.extensions.ready_made.layers:FoundLayers",
    "layers beyond memory": "lightning_gnn_dist.extensions.passes.layer_pass:beyond_memory",
    "task of a database": "lightning_gnn_dist.extensions.databases.tasks:sampler_of_task",
    "folder of a database": "lightning_gnn_dist.extensions.databases.database:plan_of_database",
    "connection of a database": "lightning_gnn_dist.extensions.databases.connection:",
    "another graph": "lightning_gnn_dist.extensions.inductive.inductive:AnotherGraph",
    "serve": "lightning_gnn_dist.extensions.serving.command:ServingTrainer",
    "shares.json": "lightning_gnn_dist.extensions.shards.opening:Shards",  # what opens a folder with such a file
    "sparse rows": "lightning_gnn_dist.extensions.tables.learned_tables:LearnedTables",
    "split of edges": "lightning_gnn_dist.extensions.links.link_split:LinkSplit",
    "saved graph": "lightning_gnn_dist.graph.storage.saved:",
    "ids of nodes": "lightning_gnn_dist.graph.user_ids:columns_for",
    "index of shards": "lightning_gnn_dist.extensions.shards.index:",
    "one shard": "lightning_gnn_dist.extensions.shards.one_shard:OneShard",
    "nodes of shards": "lightning_gnn_dist.extensions.shards.nodes:nodes_of_shards",
    "ranks of a function": "lightning_gnn_dist.extensions.notebooks.launcher:ForkLauncher",
    "graph of PyG": "lightning_gnn_dist.graph.typed.hetero:",
    "default partitioner": "lightning_gnn_dist.partition.default:default_partitioner",
    "kept partition": "lightning_gnn_dist.partition.cache:cached_partition",
    "report of a partition": "lightning_gnn_dist.partition.partition_report:",
    "rows in files": "lightning_gnn_dist.extensions.larger_than_memory.files:RowsInFiles",
    "stream to a device": "lightning_gnn_dist.extensions.larger_than_memory.device_stream:DeviceStream",
    "rows on devices": "lightning_gnn_dist.extensions.larger_than_memory.placement:RowsOnDevices",
    "memory of a fit": "lightning_gnn_dist.extensions.larger_than_memory.memory:Needs",
}


def extension(name: str) -> Any:
    """Import what an extension has under a name of :data:`EXTENSIONS`; refuse one whose folder was taken out."""
    if (found := offered(name)) is None:
        lacks = f"This needs {name!r}, which this copy of lightning_gnn_dist lacks: install all of it."
        raise ModuleNotFoundError(lacks)
    return found


def offered(name: str) -> Any | None:
    """Return what an extension has by a name that fits can do without; None where its folder was taken out."""
    return imported(EXTENSIONS[name])


def imported(place: str) -> Any | None:
    """Import ``module:name``, or ``module:``; None where the extension that has it, or one it needs, was taken out."""
    try:
        return resolve_name(place)
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith(FOLDER) or is_there(str(error.name)):
            raise
        return None


def is_there(module: str) -> bool:
    """Whether the extension that has a module was not taken out; what Python keeps of one does not count."""
    found = PathFinder.find_spec(module.removeprefix(FOLDER).partition(".")[0], [f"{dirname(__file__)}/extensions"])
    return found is not None and found.origin is not None
