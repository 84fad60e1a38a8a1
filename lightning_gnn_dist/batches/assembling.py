"""A sample becomes a batch: a store for each type takes its arrays' rows, its sizes and its blocks.

A graph without types is one of one type, which has no name: both of its stores are the one of a ``Data``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gnn_dist.batches.batch import LABELS, PoolOf, SampledData, blocks_of, gathered
from lightning_gnn_dist.batches.hetero import ENDS, LABELS_OF_LINKS, SampledHeteroData, ends_of
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.engine.apart import Apart, in_types, places_of, take_apart
from lightning_gnn_dist.engine.sample import SEED_TIME, Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import EdgeType, TypeNames, have_names


class Taken(NamedTuple):
    """The arrays of a type, and the rows that a batch takes of them.

    Attributes:
        arrays: By name.
        rows: Which rows. None where the arrays are the batch's own already, and labels are as it is to have them.
    """

    arrays: Mapping[str, Tensor]
    rows: Tensor | None = None


class Content(NamedTuple):
    """What a batch is made of, in the order of the types.

    Attributes:
        types: The types of the graph.
        apart: The batch by types.
        nodes: The arrays of each node type.
        edges: The arrays of each edge type.
        seed_type: The node type of the seeds, or the edge type of the targets.
        extra: What the sampler says of all nodes, of the edges of a graph without types, and of the seeds or targets.
        coverage: That of the seeds, where it is no array of a type.
    """

    types: TypeNames
    apart: Apart
    nodes: Sequence[Taken]
    edges: Sequence[Taken]
    seed_type: str | EdgeType
    extra: Mapping[str, Tensor]
    coverage: Tensor | None = None

    @classmethod
    def of(cls, graph: Graph, sample: Sample, seed_type: str | None = None) -> Content:
        """Return the content of a sample of a graph, whose seeds may be of several types if one is named."""
        types, of_nodes, of_edges = graph.types, graph.types.node_arrays, graph.types.edge_arrays
        apart = take_apart(graph, sample, with_ids=any(of_edges.values()))
        nodes = [Taken(of_nodes[kind], ids) for kind, ids in zip(types.node_types, apart.nodes, strict=True)]
        edges = taken_of_edges(graph, apart) if sample.edge_ids is not None else [Taken({})] * len(apart.rows)
        content = cls.by_types(types, apart, sample, nodes, edges, seed_type)
        of_part = {} if not have_names(types) else vars(graph).get("node_arrays", {})  # beside the arrays of the types
        if "coverage" not in of_part:
            return content
        return content._replace(coverage=of_part["coverage"][sample.nodes[: sample.num_sampled_nodes[0]]])

    @classmethod
    def by_types(
        cls,
        types: TypeNames,
        apart: Apart,
        sample: Sample,
        nodes: Sequence[Taken],
        edges: Sequence[Taken],
        seed_type: str | None = None,
    ) -> Content:
        """Return the content of a sample that was taken apart."""
        extra = dict(sample.extra)
        if not have_names(types):  # samplers that weigh know no types
            weights = {"edge_weight": sample.edge_weight, "node_norm": sample.node_norm}
            extra = {name: array for name, array in weights.items() if array is not None} | extra
        seeds = _seed_type(types, apart, sample) if seed_type is None else seed_type
        return cls(types, apart, nodes, edges, seeds, extra)


def taken_of_edges(graph: Graph, apart: Apart) -> list[Taken]:
    """Return what a batch takes of the arrays of each edge type, by where its edges stand in a graph or in a shard."""
    of_edges = zip(graph.types.edge_arrays.values(), apart.rows, strict=True)
    return [
        Taken(arrays, places_of(graph, number, rows.edge_ids)) if arrays else Taken({})
        for number, (arrays, rows) in enumerate(of_edges)
    ]


class Stores(NamedTuple):
    """An empty batch, and its stores: of each type, of the seeds' type, and of what belongs to no type."""

    batch: Any
    nodes: Sequence[Any]
    edges: Sequence[Any]
    of_seeds: Any
    of_all: Any

    @classmethod
    def of(cls, types: TypeNames, seed_type: str | EdgeType) -> Stores:
        """Return those of a ``HeteroData``, or of a ``Data`` if the types have no names."""
        if have_names(types):
            batch = SampledHeteroData.of(types, seed_type)
            return cls(batch, batch.node_stores, batch.edge_stores, batch[seed_type], batch._global_store)
        plain = SampledData()
        store = plain._store
        return cls(plain, [store], [store], store, store)


def assemble(
    graph: Graph, sample: Sample, pool_of: PoolOf = lambda _: None, *, widen: Widen = True, all_labels: bool = True
) -> SampledData:
    """Make a batch of a sample, with the rows of the graph's arrays for its nodes and edges.

    Args:
        graph: The graph that was sampled. With types, the batch is a
            :class:`~lightning_gnn_dist.batches.hetero.SampledHeteroData`.
        sample: The batch's nodes and edges.
        pool_of: Returns the pool that lends memory for the array of a name, or None.
        widen: Convert float16, bfloat16 and int8 with scales to float32; a type keeps that one, but in ``y``. False:
            arrays keep their types.
        all_labels: Give ``y`` a row for each node. Otherwise it has one for each seed, and no more.
    """
    return made_of(Content.of(graph, sample), pool_of, widen=widen, all_labels=all_labels)


def made_of(
    content: Content, pool_of: PoolOf = lambda _: None, *, widen: Widen = True, all_labels: bool = True
) -> SampledData:
    """Make a batch, as :func:`assemble` does, of what is taken of arrays."""
    stores, asked = Stores.of(content.types, content.seed_type), ends_of(content.seed_type)
    kinds = zip(content.types.node_types, stores.nodes, content.nodes, content.apart.num_sampled, strict=True)
    for kind, store, (arrays, rows), counts in kinds:
        if not all_labels and kind not in asked:
            arrays = {name: array for name, array in arrays.items() if name != LABELS}
        num_labels = None if all_labels else counts[0]
        store._mapping |= gathered(arrays, rows, pools_of_type(pool_of, kind), widen=widen, num_labels=num_labels)
    for store, ids in zip(stores.nodes, content.apart.nodes, strict=True):
        store._mapping.setdefault("n_id", ids)
    for edge_type, store, (arrays, rows) in zip(content.types.edge_types, stores.edges, content.edges, strict=True):
        store._mapping |= gathered(arrays, rows, pools_of_type(pool_of, edge_type), widen=widen)
        store._edge_arrays = frozenset(arrays)
    add_drawn = _add_sizes, _add_extra
    for add in add_drawn if have_names(content.types) else reversed(add_drawn):  # the order in which batches list them
        add(stores, content)
    made: SampledData = stores.batch
    return made


def _add_sizes(stores: Stores, content: Content) -> None:
    """Write how many nodes and edges the hops have, and promise the edges."""
    types, apart, asked = content.types, content.apart, ends_of(content.seed_type)
    stores.of_all._mapping["batch_size"] = sum(per_hop[0] for per_hop in apart.num_sampled)
    if content.coverage is not None:
        stores.of_all._mapping["coverage"] = content.coverage
    for kind, store, ids, per_hop in zip(types.node_types, stores.nodes, apart.nodes, apart.num_sampled, strict=True):
        if have_names(types):
            store._mapping["num_nodes"] = ids.numel()
        store._mapping["num_sampled_nodes"] = list(per_hop)
        if kind in asked:
            store._mapping["batch_size"] = per_hop[0]
    x = {kind: store._mapping.get("x") for kind, store in zip(types.node_types, stores.nodes, strict=True)}
    upto = {kind: list(accumulate(counts)) for kind, counts in zip(types.node_types, apart.num_sampled, strict=True)}
    is_corrected = "edge_weight" in content.extra
    for (sender, _, receiver), store, rows in zip(types.edge_types, stores.edges, apart.rows, strict=True):
        store._mapping["num_sampled_edges"] = list(rows.num_sampled)
        weight, csr = store._mapping.get("edge_weight"), (rows.indptr, rows.indices)
        ends = upto[receiver], upto[sender]
        blocks = blocks_of(*ends, rows.num_sampled, csr, x[sender], weight, is_corrected=is_corrected)
        store.promise(blocks, len(rows.num_sampled))


def _add_extra(stores: Stores, content: Content) -> None:
    """Give each type its rows of what the sampler says of all nodes, and the seeds or targets what it says of them."""
    num_seeds = [per_hop[0] for per_hop in content.apart.num_sampled]
    for name, array in content.extra.items():
        if name == SEED_TIME or name.startswith(LABELS_OF_LINKS):
            stores.of_seeds._mapping[name] = in_types(array, num_seeds) if name == ENDS else array
            continue
        for number, store in enumerate(stores.nodes):
            store._mapping[name] = array if len(stores.nodes) == 1 else array[content.apart.kinds == number]


def pools_of_type(pool_of: PoolOf, kind: str | EdgeType) -> PoolOf:
    """Return the pools of the arrays of a type."""
    return lambda name: pool_of(f"{kind} {name}")


def _seed_type(types: TypeNames, apart: Apart, sample: Sample) -> str | EdgeType:
    """The type of the seeds; of a batch without any, that of the training nodes."""
    if sample.target_type is not None:
        return types.edge_types[sample.target_type]
    found = [kind for kind, counts in zip(types.node_types, apart.num_sampled, strict=True) if counts[0]]
    if len(found) > 1:
        raise ValueError(f"The seeds of a batch must be nodes of one type, got some of {found}.")
    return found[0] if found else types.seed_type()
