"""A batch behaves like any PyG Data, whoever looks at it and however."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric import transforms as T
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.utils import trim_to_layer

from lightning_gnn_dist import Graph, NeighborSampler, WholePartSampler
from lightning_gnn_dist.batches import pool as pools
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.one_hop import one_hop, seen_by_layers
from lightning_gnn_dist.batches.pool import BufferPool, gather_rows
from lightning_gnn_dist.batches.seed_batch import Neighbourhood, SeedsOnly
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sampling.base import Sampler
from tests.batch_contents import is_same
from tests.sampling.reference import random_graph

GRAPH = random_graph(200, 1500, seed=2)
SEEDS = torch.tensor([4, 190, 7, 60, 33])
SAMPLER = NeighborSampler([4, 3])


def make_batch(sampler: Sampler = SAMPLER, graph: Graph = GRAPH) -> SampledData:
    return assemble(graph, sampler.sample_bulk(graph, [SEEDS], [BatchKey(0, 0, 0)])[0])


@pytest.fixture
def batch() -> SampledData:
    return make_batch()


@pytest.fixture
def plain() -> Data:
    """The same batch as an ordinary Data."""
    return Data().update(make_batch().to_dict())


def is_pending(batch: SampledData) -> bool:
    return bool(batch._store.is_pending)


def arrays_of(transform: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """A use of a batch that looks at what a transform makes of it."""
    return lambda batch: dict(sorted(transform(batch).to_dict().items()))


READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda batch: batch.edge_index,
    "item": lambda batch: batch["edge_index"],
    "get": lambda batch: batch.get("edge_index"),
    "dictionary": lambda batch: batch.to_dict()["edge_index"],
    "copy": lambda batch: copy.copy(batch).edge_index,
    "deep copy": lambda batch: copy.deepcopy(batch).edge_index,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)).edge_index,
    "to": lambda batch: batch.to("cpu").edge_index,
    "Data": lambda batch: Data.from_dict(batch.to_dict()).edge_index,
    "Batch": lambda batch: Batch.from_data_list([batch, batch]).edge_index,
    "text": lambda batch: repr(batch).replace("SampledData", "Data").replace("SeedBatch", "Data"),
    "subgraph": arrays_of(lambda batch: batch.subgraph(torch.arange(10))),
    "sort": arrays_of(lambda batch: batch.sort(sort_by_row=True)),
}
TRANSFORMS = [T.ToUndirected(), T.AddSelfLoops(), T.RemoveIsolatedNodes(), T.GCNNorm()]
READS |= {str(transform): arrays_of(transform) for transform in [*TRANSFORMS, T.AddRandomWalkPE(2, attr_name=None)]}
LOOKS: dict[str, Callable[[Any], Any]] = {
    "edges": lambda batch: batch.num_edges,
    "nodes": lambda batch: batch.num_nodes,
    "has": lambda batch: "edge_index" in batch,
    "moved": lambda batch: batch.to("cpu").num_nodes,
    "kind": lambda batch: batch.is_node_attr("x"),
    "keys": lambda batch: (sorted(batch.keys()), len(batch), sorted(copy.copy(batch).keys())),
    "pickle": lambda batch: len(pickle.dumps(batch)) > 0,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_way_of_reading_sees_the_edges(batch, made, plain, read):
    assert is_pending(batch)
    for looked_at in (batch, made.batch):
        assert is_same(read(looked_at), read(plain))
        assert looked_at.edge_index is not None  # built, if it was not
        assert is_same(read(looked_at), read(plain))


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_needs_no_edges_builds_none(batch, plain, look):
    assert look(batch) == look(plain)
    assert is_pending(batch)


def test_blocks_go_when_the_edges_are_replaced(batch):
    kept = copy.copy(batch)
    batch.edge_index = batch.edge_index[:, :3]
    assert batch.edge_index.size(1) == 3
    with pytest.raises(AttributeError, match="its edge_index was replaced"):
        _ = batch.blocks
    assert not hasattr(batch, "blocks")
    assert not hasattr(batch.to("cpu"), "blocks")
    assert kept.num_edges > 3
    assert len(kept.blocks) == 2
    assert not hasattr(kept.subgraph(torch.arange(10)), "blocks")


def test_blocks_follow_edge_weight(batch):
    assert batch.blocks[0].adj.values().unique().tolist() == [1.0]
    batch.edge_weight = torch.rand(batch.num_edges)
    for block in batch.blocks:
        assert block.weighted_adj.values().equal(batch.edge_weight[: block.num_edges])
    assert pickle.loads(pickle.dumps(batch)).blocks[0].weighted_adj.values().equal(batch.edge_weight)
    del batch.edge_weight
    assert batch.blocks[0].weight is None


def test_a_copy_is_independent_of_its_original(batch):
    twin = copy.copy(batch)
    twin.x, twin.edge_index, twin.extra = None, None, 5
    assert batch.x.size(0) == batch.num_nodes
    assert batch.edge_index.size(1) == batch.num_edges
    assert "extra" not in batch
    assert "edge_index" not in twin


def test_a_batch_that_is_moved_or_pickled_keeps_its_blocks_and_the_promise(batch):
    twin, edges, blocks = pickle.loads(pickle.dumps(batch)), batch.num_edges, batch.blocks
    assert is_pending(twin) and is_same(edges_of(twin), edges_of(batch))
    assert twin.blocks[1].indices.data_ptr() == twin.blocks[0].indices.data_ptr()
    assert batch.to("cpu").blocks[0] is blocks[0]
    moved = batch.to("meta")
    assert is_pending(moved)
    assert {block.indices.device.type for block in moved.blocks} == {"meta"}
    assert moved.edge_index.is_meta and moved.edge_index.shape == (2, edges)


@pytest.mark.parametrize("sampler", [NeighborSampler([4, 3, 2]), WholePartSampler(2), WholePartSampler(3)], ids=repr)
def test_trim_to_layer_leaves_the_blocks(sampler):
    batch = make_batch(sampler)
    x, edge_index, edge_attr = batch.x, batch.edge_index, batch.edge_attr
    for layer, block in enumerate(batch.blocks):
        x, edge_index, edge_attr = trim_to_layer(
            layer, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index, edge_attr
        )
        # Untrimmed there may be edges that no layer needs.
        count = block.num_edges if layer == 0 else edge_index.size(1)
        assert edge_index[:, :count].equal(block.edge_index)
        assert x.equal(batch.x[: block.num_src])
        assert edge_attr[:count].equal(batch.edge_attr[: block.num_edges])


def test_a_graph_without_arrays_or_edges_makes_a_batch():
    batch = make_batch(graph=Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 200))
    assert (batch.num_nodes, batch.num_edges) == (5, 0)
    assert batch.edge_index.shape == (2, 0)
    assert batch.blocks[0].adj.to_dense().equal(torch.zeros(5, 5))


# A batch of promises: seeds without sampling, and for every other use the batch that it stands for, bit for bit.


NUM_SEEDS = len(SEEDS)
NAMES = [*GRAPH.node_arrays, "n_id", *GRAPH.edge_arrays]


class Made:
    """A batch of promises, and whether its neighbourhood was sampled."""

    def __init__(self) -> None:
        self.samples, self.model = 0, object()
        self.rows = torch.randn(NUM_SEEDS, 3)
        neighbourhood = Neighbourhood({None: NUM_SEEDS}, self.make, self.seed_rows, self.rows_of)
        self.batch: Any = SeedsOnly.around(neighbourhood, {None: NAMES}, None, {})

    def make(self) -> SampledData:
        self.samples += 1
        return make_batch()

    def seed_rows(self, _: object, name: str) -> Tensor | None:
        if name == "n_id":
            return SEEDS
        return GRAPH.node_arrays[name][SEEDS] if name in GRAPH.node_arrays else None

    def rows_of(self, module: object) -> Any:
        return (lambda: [self.rows]) if module is self.model else None


@pytest.fixture
def made() -> Made:
    return Made()


SEED_USES = {
    "y": lambda batch: batch.y[: batch.batch_size],
    "x": lambda batch: batch.x[:NUM_SEEDS],
    "some": lambda batch: batch.x[0:2],
    "n_id": lambda batch: batch.n_id[: batch.batch_size],
    "get": lambda batch: batch.get("y")[:NUM_SEEDS],
    "moved": lambda batch: batch.to("cpu").y[:NUM_SEEDS],
    "type": lambda batch: (batch.x.dtype, batch.y.device, batch.x.is_floating_point(), batch.x.is_cuda),
    "keys": lambda batch: list(batch.keys()),
    "num": lambda batch: (batch.num_targets, len(batch), "x" in batch, "z" in batch, batch.is_filler),
    "has": lambda batch: (hasattr(batch, "x"), hasattr(batch, "z"), batch.get("z", 3)),
}

USES = {
    "shape": lambda batch: (batch.x.shape, batch.x.size(0), len(batch.y), batch.y.numel(), batch.edge_index.shape),
    "arithmetic": lambda batch: 2 * batch.x - batch.x / 3 + 1,
    "index": lambda batch: batch.x[batch.edge_index[0]],
    "slices": lambda batch: (batch.x[NUM_SEEDS:], batch.x[: NUM_SEEDS + 1], batch.x[:-1], batch.y[::2], batch.x[:2, 1]),
    "numpy": lambda batch: (batch.x.numpy(), np.asarray(batch.y), np.add(batch.y.numpy(), 1)),
    "list": lambda batch: (batch.y.tolist(), [int(y) for y in batch.y], float(batch.x.sum())),
    "functions": lambda batch: (torch.cat([batch.x, batch.x]), torch.stack([batch.y]), torch.equal(batch.x, batch.x)),
    "operator": lambda batch: torch.ops.aten.mul(batch.x, 2),
    "script": lambda batch: torch.jit.script(_twice)(batch.x),
    "instance": lambda batch: (isinstance(batch.x, Tensor), torch.is_tensor(batch.x), isinstance(batch, SampledData)),
    "copy": lambda batch: (copy.copy(batch.x), copy.deepcopy(batch.y), batch.x.clone()),
    "pickles": lambda batch: (*map(pickle.loads, map(pickle.dumps, (batch.x, batch))), saved(batch)),
    "blocks of copies": lambda batch: [edges_of(copied) for copied in copies_of(batch)],
    "items": lambda batch: [value + 0 if isinstance(value, Tensor) else value for _, value in batch],
    "names": lambda batch: (batch.to_dict().keys(), list(dict(batch)), batch.to_namedtuple()._fields),
    "sizes": lambda batch: (batch.num_sampled_nodes, batch["num_sampled_edges"], batch.get("num_sampled_nodes")),
    "num": lambda batch: (batch.num_nodes, batch.num_edges, batch.num_features, batch.num_edge_features),
    "kinds": lambda batch: (batch.is_node_attr("y"), batch.is_edge_attr("edge_attr"), batch.is_directed()),
    "blocks": lambda batch: (batch.has_blocks, edges_of(batch), len(batch.blocks)),
    "one hop": lambda batch: one_hop(batch.read() if isinstance(batch, SeedsOnly) else batch, seen_by_layers(batch)[1]),
    "doubled": lambda batch: batch.apply(doubled),
    "set": lambda batch: (setattr(batch, "z", batch.x), batch.z + 0)[1],
    "gradients": lambda batch: torch.autograd.grad((batch.x.requires_grad_() ** 2).sum(), batch.x)[0],
}

CHANGES = {
    "x": lambda batch: setattr(batch, "x", batch.x * 2),
    "x in place": lambda batch: batch.x.mul_(2),
    "seeds of x": lambda batch: batch.x[:NUM_SEEDS].__setitem__(0, 0) or batch.x.__setitem__(slice(0, 2), 1.0),
    "numpy": lambda batch: batch.x.numpy().fill(3),
    "edges": lambda batch: setattr(batch, "edge_index", batch.edge_index.flip(0)),
    "edge weights": lambda batch: setattr(batch, "edge_weight", torch.arange(1.0, batch.num_edges + 1)),
    "no y": lambda batch: batch.__delattr__("y"),
    "another": lambda batch: setattr(batch, "mask", torch.ones(3)),
    "blocks": lambda batch: setattr(batch, "blocks", batch.blocks[1:]),
    "doubled": lambda batch: batch.apply(doubled),
    "in place": lambda batch: batch.apply_(lambda tensor: tensor.add_(1), "x"),
    "updated": lambda batch: batch.update({"x": torch.ones(3)}),
}


def doubled(tensor: Tensor) -> Tensor:
    return tensor * 2 if tensor.is_floating_point() else tensor


def _twice(x: Tensor) -> Tensor:
    return x + x


def edges_of(batch: Any) -> list[Any]:
    return [(block.edge_index, block.indptr, block.weight is None or block.weight.tolist()) for block in batch.blocks]


def copies_of(batch: Any) -> list[Any]:
    return [copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), batch.clone(), batch.to("cpu")]


def saved(batch: Any) -> Any:
    file = io.BytesIO()
    torch.save(batch, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("use", SEED_USES.values(), ids=SEED_USES)
def test_seeds_are_had_without_sampling(made, use):
    assert is_same(use(made.batch), use(make_batch()))
    assert made.samples == 0


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_other_use_sees_the_whole_batch(made, use):
    assert is_same(use(made.batch), use(make_batch()))
    assert is_same(use(made.batch), use(made.batch))  # read before
    assert "SeedBatch" not in type(copy.deepcopy(made.batch)).__name__


def test_it_is_sampled_once(made):
    batch = made.batch
    for name in NAMES:
        batch[name] + 0
    assert batch.num_nodes and batch.blocks and batch.num_sampled_nodes and copy.deepcopy(batch).blocks
    assert made.samples == 1


WAYS = {"same": lambda batch: batch, "moved": lambda batch: batch.to("cpu"), "copied": copy.copy}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("then", WAYS.values(), ids=WAYS)
def test_a_changed_batch_is_never_answered_with_ready_rows(made, change, then):
    known = make_batch()
    change(made.batch), change(known)
    found = then(made.batch)
    assert found.rows_of(made.model) is None
    assert is_same(found, known)
    assert is_same(found.y[:NUM_SEEDS], known.y[:NUM_SEEDS]) if "y" in known else "y" not in found
    assert found.has_blocks == known.has_blocks
    if known.has_blocks:
        assert is_same(edges_of(found), edges_of(known))
        assert is_same(edges_of(copy.deepcopy(found)), edges_of(known))


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_an_unchanged_batch_is_answered_with_ready_rows(made, how):
    batch = how(made.batch)
    assert batch.y[:2].equal(make_batch().y[:2])
    assert batch.rows_of(made.model)[0].equal(made.rows)
    assert batch.rows_of(object()) is None
    assert made.samples == 0
    batch.x + 1
    assert batch.rows_of(made.model) is None


def test_rows_and_arrays_move_with_the_batch(made):
    batch = made.batch.to("meta")
    assert batch.x[:2].is_meta
    assert batch.rows_of(made.model)[0].is_meta
    assert batch.edge_index.is_meta
    assert all(block.indptr.is_meta for block in batch.blocks)


@pytest.mark.slow  # compiling is imported for it
def test_a_compiled_model_takes_promises(made):
    torch.manual_seed(0)
    gnn = GraphSAGE(GRAPH.node_arrays["x"].shape[1], 4, 2, 3).eval()
    known = make_batch()
    with torch.no_grad():
        expected = gnn(known.x, known.edge_index)
        assert gnn(made.batch.x, made.batch.edge_index).equal(expected)
        assert torch.compile(gnn, backend="eager")(made.batch.x, made.batch.edge_index).allclose(expected)


# Rows are copied exactly, and a buffer comes back only when nobody can see it.


ROWS = torch.tensor([3, 0, 3, 9, 5])


@pytest.fixture
def pool(monkeypatch) -> BufferPool:
    """A pool that also takes small arrays."""
    monkeypatch.setattr(pools, "SMALL_BYTES", 1)
    monkeypatch.setattr(pools, "POOLED_BYTES", 1)
    return BufferPool(max_free=2)


TYPES = ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("name", TYPES)
def test_rows_of_any_type_are_copied(pool, name):
    dtype = getattr(torch, name)
    for shape in ((10,), (10, 1), (10, 7), (10, 64), (10, 3, 5), (10, 1433), (10, 0)):
        whole = (torch.randn(shape) * 100).to(torch.int64).to(dtype)
        with_gaps = whole.repeat_interleave(2, 0)[::2]
        for array, rows in ((whole, ROWS), (whole, ROWS[:0]), (with_gaps, ROWS)):
            out = gather_rows(array, rows, pool)
            assert out.dtype == dtype
            assert out.equal(array[rows])
            assert gather_rows(array, rows).equal(array[rows])


@pytest.mark.parametrize("width", [1, 2, 128, 1433])
@pytest.mark.parametrize(
    ("dtype", "helps"), [(torch.float16, True), (torch.float16, False), (torch.bfloat16, True)], ids=str
)
def test_every_half_is_widened_as_torch_does_it(pool, dtype, helps, width, monkeypatch):
    monkeypatch.setattr(pools, "WIDENS_HALVES", pools.WIDENS_HALVES and helps)  # the processor
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    array = every.repeat(-(-10 * width // every.numel()) + 1)
    array = array[: array.numel() // width * width].view(-1, width)
    rows = torch.randint(len(array), (70_000 // width + 3,))
    out, expected = gather_rows(array, rows, pool, widen=True), array[rows].float()
    assert out.dtype == torch.float32
    assert out.isnan().equal(expected.isnan())
    out, expected = out.nan_to_num(0.5), expected.nan_to_num(0.5)  # a NaN may have any sign
    assert out.equal(expected) and out.signbit().equal(expected.signbit())
    assert gather_rows(array, rows[:2], widen=True).nan_to_num(0.5).equal(expected[:2])


def test_without_being_asked_nothing_is_widened():
    for dtype, widen in ((torch.float16, False), (torch.float64, True), (torch.int8, True)):
        assert gather_rows(torch.ones(10, 3, dtype=dtype), ROWS, widen=widen).dtype == dtype


def test_a_buffer_is_used_again_when_nobody_holds_it(pool):
    out = gather_rows(torch.randn(10, 8), ROWS, pool)
    address = out.data_ptr()
    assert address % 64 == 0 and pool.num_free == 0
    del out
    assert pool.num_free == 1
    assert gather_rows(torch.randn(10, 8), ROWS, pool).data_ptr() == address


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: x,
        lambda x: x.view(torch.uint8),
        lambda x: x.numpy(),
        lambda x: (x * torch.ones(8, requires_grad=True)).sum(),  # autograd saves x
        lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    ],
)
def test_whoever_holds_a_part_of_a_buffer_keeps_it(pool, hold):
    array = torch.randn(10, 8)
    held = hold(gather_rows(array, ROWS, pool))
    gc.collect()
    assert pool.num_free == 0
    others = [gather_rows(torch.zeros(10, 8), ROWS, pool) for _ in range(5)]
    if isinstance(held, torch.Tensor) and held.requires_grad:
        held.sum().backward()  # reads what was saved
    del others, held
    gc.collect()
    assert pool.num_free == 2


def test_a_pool_may_go_before_its_buffers():
    pool = BufferPool(max_free=2)
    view = pool.take(1000)
    view[:] = 7
    del pool
    gc.collect()
    assert (view == 7).all()


def test_threads_share_a_pool(pool):
    array = torch.arange(100.0).repeat(16, 1).t().contiguous()

    def is_right(seed: int) -> bool:
        generator, found = torch.Generator().manual_seed(seed), []
        for _ in range(200):
            rows = torch.randint(100, (50,), generator=generator)
            first, second = gather_rows(array, rows, pool), gather_rows(array, rows.flip(0), pool)
            found.append(first.equal(array[rows]) and second.equal(array[rows.flip(0)]))
        return all(found)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, range(4)))
    assert pool.num_free == 2
