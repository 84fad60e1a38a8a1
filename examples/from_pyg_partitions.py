"""The folder that ``torch_geometric.distributed.Partitioner`` writes, as a saved graph.

    python from_pyg_partitions.py my_parts my_graph

Nodes keep their numbers in the whole graph, and their part is the array ``part``, which divides the graph again as it
was: ``Partition(graph.types.node_arrays["paper"]["part"], num_parts)``. Labels and masks, which PyG leaves out, are
given as arrays: ``labels(graph)`` below is the place. The files are loaded with ``torch.load``: take those you trust.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from lightning_gnn_dist import prepare_graph


def load(file: Path) -> Any:
    return torch.load(file, weights_only=False)


def in_order(ids: list[Tensor], rows: list[Any]) -> Tensor:
    """The rows of all parts, in the order of their ids."""
    return torch.cat([each for each in rows if each is not None])[torch.cat(ids).argsort()]


def read(folder: Path) -> Any:
    """All parts together, as a ``HeteroData``, or as a ``Data`` where there are no types."""
    about = json.loads((folder / "META.json").read_text())
    names = "graph", "node_feats", "edge_feats"
    parts = [{name: load(folder / f"part_{at}" / f"{name}.pt") for name in names} for at in range(about["num_parts"])]
    is_typed, data = about["is_hetero"], HeteroData()
    for kind in about["node_types"] if is_typed else ["node"]:
        data[kind].part = load(folder / "node_map" / f"{kind}.pt" if is_typed else folder / "node_map.pt")
        held = [part["node_feats"][kind] if is_typed else part["node_feats"] for part in parts]
        ids = [each.get("id", each.get("global_id")) for each in held]
        for name in held[0].get("feats") or {}:
            data[kind][name] = in_order(ids, [each["feats"][name] for each in held])
        if "time" in held[0]:  # of all nodes, in every part
            data[kind].time = held[0]["time"]
    for kind in map(tuple, about["edge_types"]) if is_typed else [("node", "to", "node")]:
        graphs = [part["graph"][kind] if is_typed else part["graph"] for part in parts]
        ids = [graph["edge_id"] for graph in graphs]
        ends = [torch.stack([graph["row"], graph["col"]], 1) for graph in graphs]
        data[kind].edge_index = in_order(ids, ends).T.contiguous()
        held = [(part["edge_feats"] or {}).get(kind, {}) if is_typed else part["edge_feats"] or {} for part in parts]
        for name in (held[0] or {}).get("feats") or {}:
            data[kind][name] = in_order(ids, [each["feats"][name] for each in held])
        if held[0] and "edge_time" in held[0]:
            data[kind].edge_time = in_order(ids, [each["edge_time"] for each in held])
    return data if is_typed else data.to_homogeneous(add_node_type=False, add_edge_type=False)


def labels(graph: Any) -> None:
    """Add what PyG leaves out, as in ``graph["paper"].y = torch.load("labels.pt")``."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--time", help="the array by which edges of one type into a node are ordered")
    given = parser.parse_args()
    graph, file = read(given.folder), given.out.with_name(given.out.name + ".pt")
    labels(graph)
    torch.save(graph, file)
    prepare_graph(file, given.out, time=given.time)
    file.unlink()
