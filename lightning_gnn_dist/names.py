"""The names by which the core asks for what it does not import: extensions, and what few fits need of the core."""

from __future__ import annotations

from importlib import import_module
from typing import Any

EXTENSIONS = {  # what a user asks for by something else than its class, such as a layer of torch
    "by time": "lightning_gnn_dist.extensions.temporal.temporal_sampler:TemporalSampler",
    "layers of PyG": "lightning_gnn_dist.extensions.ready_made.layers:FoundLayers",
    "layers beyond memory": "lightning_gnn_dist.extensions.passes.layer_pass:beyond_memory",
    "task of a database": "lightning_gnn_dist.extensions.databases.tasks:sampler_of_task",
    "explained errors": "lightning_gnn_dist.extensions.explaining.models:explain",
    "another graph": "lightning_gnn_dist.extensions.inductive.inductive:AnotherGraph",
    "serve": "lightning_gnn_dist.extensions.serving.command:ServingTrainer",
    "shares.json": "lightning_gnn_dist.extensions.shards.opening:Shards",  # what opens a folder with such a file
    "sparse rows": "lightning_gnn_dist.extensions.tables.learned_tables:LearnedTables",
    "split of edges": "lightning_gnn_dist.extensions.links.link_split:LinkSplit",
    "saved graph": "lightning_gnn_dist.graph.storage.saved:open_graph",
    "saving a graph": "lightning_gnn_dist.graph.storage.saved:save_graph",
    "ids of nodes": "lightning_gnn_dist.graph.user_ids:columns_for",
    "index of shards": "lightning_gnn_dist.extensions.shards.index:Bounds",
    "shard": "lightning_gnn_dist.extensions.shards.index:Shard",
    "nodes of shards": "lightning_gnn_dist.extensions.shards.nodes:nodes_of_shards",
    "ranks of a function": "lightning_gnn_dist.extensions.notebooks.function_launcher:FunctionLauncher",
    "PyG's graph": "lightning_gnn_dist.graph.typed.hetero:graph_of",
    "graph for PyG": "lightning_gnn_dist.graph.typed.hetero:to_pyg",
    "default partitioner": "lightning_gnn_dist.partition.default:default_partitioner",
    "kept partition": "lightning_gnn_dist.partition.cache:cached_partition",
    "advice on averaging": "lightning_gnn_dist.partition.partition_report:against_averaging",
    "report of a partition": "lightning_gnn_dist.partition.partition_report:PartitionReport",
    "rows in files": "lightning_gnn_dist.extensions.larger_than_memory.files:RowsInFiles",
    "stream to a device": "lightning_gnn_dist.extensions.larger_than_memory.device_stream:DeviceStream",
    "rows on devices": "lightning_gnn_dist.extensions.larger_than_memory.placement:RowsOnDevices",
    "memory of a fit": "lightning_gnn_dist.extensions.larger_than_memory.memory:Needs",
}


def extension(name: str) -> Any:
    """Import what an extension has under a name of :data:`EXTENSIONS`; refuse one whose folder was taken out."""
    lacks = f"This needs {name!r}, which this copy of lightning_gnn_dist lacks: install the whole package."
    if name not in EXTENSIONS:
        raise ImportError(lacks)
    module, _, attribute = EXTENSIONS[name].partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ImportError(lacks) from error


def offered(name: str) -> Any:
    """Return what an extension has by a name that fits can do without; None where its folder was taken out."""
    return extension(name) if name in EXTENSIONS else None
