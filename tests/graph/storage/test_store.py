"""A saved graph: the same after opening, cheap to open, refused when damaged, never half-written."""

import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh64

import lightning_gnn_dist as lgd
from lightning_gnn_dist import Graph, RandomPartitioner
from lightning_gnn_dist.graph.storage import contents, store
from lightning_gnn_dist.graph.storage.npy import NpyFile, checksum_of, header_of, save_for_good
from lightning_gnn_dist.graph.storage.saved import open_graph
from lightning_gnn_dist.graph.user_ids import nodes_with_ids, user_ids
from lightning_gnn_dist.partition.cache import cached_partition
from tests.graph.equal import check_equal
from tests.graph.test_graph import random_edges
from tests.ranks import run_ranks


@pytest.fixture
def graph() -> lgd.Graph:
    edges = random_edges()
    arrays = {
        "x": torch.randn(40, 3, generator=torch.Generator().manual_seed(0)),
        "half": torch.randn(40, 2).bfloat16(),
        "y": torch.arange(40),
        "train_mask": torch.arange(40) < 9,
    }
    return lgd.Graph.from_edge_index(edges, 40, arrays, {"edge_type": edges[0] % 3})


@pytest.fixture
def saved(graph: lgd.Graph, tmp_path: Path) -> Path:
    graph.save(tmp_path / "graph")
    return tmp_path / "graph"


def test_everything_comes_back(graph: lgd.Graph, saved: Path) -> None:
    opened = lgd.Graph.open(saved)
    assert opened.path == saved
    check_equal(opened, graph)


def test_writing_to_an_opened_graph_does_not_reach_the_file(graph: lgd.Graph, saved: Path) -> None:
    lgd.Graph.open(saved).node_arrays["x"].zero_()
    assert torch.equal(lgd.Graph.open(saved).node_arrays["x"], graph.node_arrays["x"])


def test_an_opened_graph_travels_as_its_path(saved: Path) -> None:
    sent = pickle.dumps(lgd.Graph.open(saved))
    assert len(sent) < 500 and pickle.loads(sent).num_nodes == 40


def test_opening_reads_no_features(tmp_path: Path) -> None:
    num_nodes = 1000
    edges = torch.zeros(2, 0, dtype=torch.long)
    lgd.Graph.from_edge_index(edges, num_nodes, {"x": torch.zeros(num_nodes, 4)}).save(tmp_path / "graph")
    huge = tmp_path / "graph" / "nodes" / "x.npy"  # a sparse file: 400 GB that nobody could read
    np.lib.format.open_memmap(huge, mode="w+", dtype=np.float32, shape=(num_nodes, 100_000_000)).flush()
    meta = json.loads((tmp_path / "graph" / "meta.json").read_text())
    meta["arrays"]["nodes/x"]["shape"] = [num_nodes, 100_000_000]
    (tmp_path / "graph" / "meta.json").write_text(json.dumps(meta))
    assert lgd.Graph.open(tmp_path / "graph").node_arrays["x"].shape == (num_nodes, 100_000_000)


def test_an_existing_path_is_kept_unless_asked(graph: lgd.Graph, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="overwrite=True"):
        graph.save(saved)
    other = lgd.Graph.from_edge_index(random_edges(), 50)
    other.save(saved, overwrite=True)
    assert lgd.Graph.open(saved).num_nodes == 50
    (tmp_path / "precious").mkdir()
    with pytest.raises(FileExistsError, match="not a saved graph"):
        graph.save(tmp_path / "precious", overwrite=True)


def test_a_graph_is_not_saved_onto_itself(saved: Path) -> None:
    with pytest.raises(ValueError, match="another path"):
        lgd.Graph.open(saved).save(saved, overwrite=True)


def test_a_graph_with_changes_beside_it_is_refused_by_name(graph: lgd.Graph, saved: Path) -> None:
    (saved / "ids").mkdir()
    np.save(saved / "ids" / "nodes.npy", np.arange(graph.num_nodes))
    sent = pickle.dumps(lgd.Graph.open(saved))
    (saved / "changes" / "000001").mkdir(parents=True)
    says = re.escape(f"{saved}/changes holds changes of a saved graph, which this release does not read: write them ")
    reads: list[Callable[[Path], object]] = [
        lgd.Graph.open,
        user_ids,
        lambda path: nodes_with_ids(path, [3]),
        lambda path: lgd.PartitionedDataModule(path, sampler=lgd.NeighborSampler([2])),
        lambda path: pickle.loads(sent),
    ]
    for read in reads:
        with pytest.raises(ValueError, match=says):
            read(saved)


def test_versions_that_a_release_before_has_counted_are_no_obstacle(graph: lgd.Graph, saved: Path) -> None:
    meta = json.loads((saved / "meta.json").read_text())
    (saved / "meta.json").write_text(json.dumps(meta | {"history": [{"": 30}]}))
    assert lgd.Graph.open(saved).fingerprint == graph.fingerprint


def test_a_failure_leaves_nothing_behind(graph, saved, tmp_path, monkeypatch) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(store, "save_for_good", full_disk)
    with pytest.raises(OSError, match="No space left"):
        graph.save(tmp_path / "second")
    with pytest.raises(OSError, match="No space left"):
        graph.save(saved, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph"]
    assert lgd.Graph.open(saved).num_nodes == 40


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a saved graph"):
        lgd.Graph.open(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": "parquet"}')
    with pytest.raises(ValueError, match="not a graph saved by this package"):
        lgd.Graph.open(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": ')
    with pytest.raises(ValueError, match="damaged"):
        lgd.Graph.open(tmp_path)


def test_a_name_cannot_leave_the_directory(graph: lgd.Graph, saved: Path, tmp_path: Path) -> None:
    graph.node_arrays["../../evil"] = torch.zeros(40)
    with pytest.raises(ValueError, match=r"'\.\./\.\./evil' cannot be the name|\.\./\.\./evil cannot be the name"):
        graph.save(tmp_path / "second")
    meta = json.loads((saved / "meta.json").read_text())
    meta["arrays"]["nodes/../../secret"] = meta["arrays"]["nodes/y"]
    (saved / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="cannot be the name"):
        lgd.Graph.open(saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph"]


def test_a_newer_version_is_refused(saved: Path) -> None:
    meta = json.loads((saved / "meta.json").read_text())
    (saved / "meta.json").write_text(json.dumps(meta | {"version": 99}))
    with pytest.raises(ValueError, match=r"version 99.*upgrade"):
        lgd.Graph.open(saved)


def open_under_a_limit(rank: int, world_size: int, path: str) -> str:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 20_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        lgd.Graph.open(path)
    except MemoryError as error:
        return str(error).replace(f"{limit:,}", "LIMIT")
    return ""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_a_limit_on_maps_is_named(tmp_path: Path) -> None:
    x = torch.zeros(1000, 100_000, dtype=torch.int8)
    lgd.Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), 1000, {"x": x}).save(tmp_path / "graph")
    (said,) = run_ranks(open_under_a_limit, 1, str(tmp_path / "graph"))
    assert "x.npy cannot be mapped: its 100,000,128 bytes" in said
    assert "ulimit -v: LIMIT bytes" in said


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_not_replaced(tmp_path: Path, exists: bool) -> None:
    graph = lgd.communities(30, 2)
    if exists:
        graph.save(tmp_path / "there")
    (tmp_path / "link").symlink_to("there")
    with pytest.raises(FileExistsError, match="link is a link"):
        graph.save(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 1 + exists


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.astype(">f4"), "holds >f4, which torch cannot compute with"),
        (np.asfortranarray, "is stored by column"),
    ],
)
def test_other_layouts_are_called_by_their_names(saved: Path, change: Callable[[Any], Any], message: str) -> None:
    file = saved / "nodes" / "x.npy"
    x = np.load(file)
    file.unlink()
    np.save(file, change(x))
    with pytest.raises(ValueError, match=rf"x\.npy cannot be used \(.*{message}"):
        lgd.Graph.open(saved)


def test_a_graph_that_was_changed_is_not_saved(tmp_path: Path) -> None:
    def graph() -> lgd.Graph:
        return lgd.Graph(torch.tensor([0, 1, 1]), torch.tensor([1]), {"z": torch.ones(2)})

    with pytest.raises(ValueError, match=r"beside holds \['indices'\], which are arrays of the graph"):
        graph().save(tmp_path / "graph", beside={"indices": torch.zeros(1)})
    changed = graph()
    changed.indices[0] = 7
    with pytest.raises(ValueError, match="indices must lie in"):
        changed.save(tmp_path / "graph")
    changed = graph()
    changed.node_arrays["z"] = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="requires a gradient"):
        changed.save(tmp_path / "graph")


# Files of saved graphs that were damaged, swapped or are none: refused in a sentence, before a loop runs on them.


NUM_NODES = 60
Damage = Callable[[Path], None]


def graph_of(seed: int) -> lgd.Graph:
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, NUM_NODES, (2, 200), generator=generator)
    nodes = {"x": torch.randn(NUM_NODES, 3, generator=generator), "y": torch.arange(NUM_NODES) % (4 + seed)}
    return lgd.Graph.from_edge_index(torch.cat([ends, ends.flip(0)], 1), NUM_NODES, nodes)


@pytest.fixture(scope="module")
def saved_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for name, seed in (("mine", 0), ("other", 1)):
        graph = graph_of(seed)
        graph.save(root / name / "graph")
    return root


def written(content: bytes) -> Damage:
    def damage(file: Path) -> None:
        file.unlink()
        file.write_bytes(content)

    return damage


def changed(change: Callable[[bytes], bytes]) -> Damage:
    return lambda file: written(change(file.read_bytes()))(file)


def entry(place: int, value: int) -> Damage:
    """Another number in an array, which keeps its type and shape."""

    def damage(file: Path) -> None:
        array = np.load(file)
        array[place] = np.int64(value).astype(array.dtype)
        file.unlink()
        np.save(file, array)

    return damage


def array(change: Callable[[Any], Any]) -> Damage:
    def damage(file: Path) -> None:
        found = np.load(file)
        file.unlink()
        np.save(file, change(found), allow_pickle=True)

    return damage


def another_kind(make: Callable[[Path], object]) -> Damage:
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


NO_FILES = {"pipe": another_kind(os.mkfifo), "directory": another_kind(os.mkdir), "missing": another_kind(str)}
OF_ARRAYS = NO_FILES | {
    "empty": written(b""),
    "half": changed(lambda raw: raw[: len(raw) // 2]),
    "longer": changed(lambda raw: raw + b"x"),
    "a bit": changed(lambda raw: raw[:-9] + bytes([raw[-9] ^ 64]) + raw[-8:]),
    "no header": changed(lambda raw: raw[:10] + b"{" * (len(raw) - 10)),
    "huge shape": changed(lambda raw: header_of(np.dtype(np.int64), (10**15,)) + raw[128:]),
    "floats": array(lambda found: found.astype(np.float64)),
    "shorter": array(lambda found: found[:-1]),
    "objects": array(lambda found: found.astype(object)),
    "zeros": array(np.zeros_like),
}
OF_EDGES = {
    "indices": [(7, 10**9), (7, -1), (7, NUM_NODES), (7, -(2**31))],
    "indptr": [(3, -5), (3, 10**12), (3, 10**6), (0, 1), (NUM_NODES, 1)],
}
OF_TEXT = NO_FILES | {
    "empty": written(b""),
    "half": changed(lambda raw: raw[: len(raw) // 2]),
    "a list": written(b"[]"),
    "null": written(b"null"),
    "deep": written(b"[" * 100_000),
    "other bytes": written(b"\xff\xfe\x00"),
}


def damaged(saved_whole: Path, tmp_path: Path, what: str, file: str, damage: Damage) -> Path:
    shutil.rmtree(tmp_path / what, ignore_errors=True)
    shutil.copytree(saved_whole / "mine" / what, tmp_path / what)
    damage(tmp_path / what / file)
    return tmp_path / what


ARRAYS = ["indptr", "indices", "nodes/y"]


@pytest.mark.parametrize("damage", OF_ARRAYS.values(), ids=OF_ARRAYS)
def test_a_damaged_array_is_refused(saved_whole: Path, tmp_path: Path, damage: Damage) -> None:
    for name in ARRAYS:
        path = damaged(saved_whole, tmp_path, "graph", f"{name}.npy", damage)
        with pytest.raises(ValueError, match=rf"{name}.npy (cannot be used|is damaged|holds|is not the file)"):
            lgd.Graph.open(path)


@pytest.mark.parametrize(("name", "place", "value"), [(name, *bad) for name, all_ in OF_EDGES.items() for bad in all_])
@pytest.mark.parametrize("with_checksums", [True, False])
def test_edges_that_point_nowhere_are_refused(saved_whole, tmp_path, name, place, value, with_checksums) -> None:
    path = damaged(saved_whole, tmp_path, "graph", f"{name}.npy", entry(place, value))
    if not with_checksums:  # as releases before these wrote it
        meta = json.loads((path / "meta.json").read_text())
        for about in meta["arrays"].values():
            del about["xxh64"]
        written(json.dumps(meta).encode())(path / "meta.json")
    with pytest.raises(ValueError, match=rf"{name}\.npy is damaged \("):
        lgd.Graph.open(path)


@pytest.mark.parametrize("damage", OF_TEXT.values(), ids=OF_TEXT)
def test_a_damaged_description_is_refused(saved_whole: Path, tmp_path: Path, damage: Damage) -> None:
    path = damaged(saved_whole, tmp_path, "graph", "meta.json", damage)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{path}"):
        lgd.Graph.open(path)


ENTRIES = ["version", "fingerprint", "arrays", "dtype", "shape", "xxh64"]
VALUES: list[Any] = [None, -1, "x", [], {}, True, 2**70, [None], ["x"]]
MAY_BE = [("fingerprint", "x"), ("xxh64", None)]


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_of_another_type_are_refused(saved_whole: Path, tmp_path: Path, entry: str) -> None:
    for value in (value for value in VALUES if (entry, value) not in MAY_BE):
        meta = json.loads((saved_whole / "mine" / "graph" / "meta.json").read_text())
        about = meta if entry in meta else meta["arrays"]["nodes/y"]
        about[entry] = value
        path = damaged(saved_whole, tmp_path, "graph", "meta.json", written(json.dumps(meta).encode()))
        with pytest.raises(ValueError, match=r"meta\.json|saved in format version|is not the file|holds"):
            lgd.Graph.open(path)


def test_features_of_another_graph_are_noticed_when_all_is_read(saved_whole: Path, tmp_path: Path) -> None:
    other = (saved_whole / "other" / "graph" / "nodes" / "x.npy").read_bytes()
    path = damaged(saved_whole, tmp_path, "graph", "nodes/x.npy", written(other))
    lgd.Graph.open(path)
    with pytest.raises(ValueError, match=r"x\.npy is not the file that was saved.*another graph's"):
        store.verify(path)
    assert store.verify(saved_whole / "mine" / "graph") == []


def test_a_graph_is_looked_at_once(saved_whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, looks = tmp_path / "graph", []
    shutil.copytree(saved_whole / "mine" / "graph", path)
    check_edges = contents.check_edges
    monkeypatch.setattr(contents, "check_edges", lambda *args: (looks.append(1), check_edges(*args)))
    lgd.Graph.open(path)
    assert looks == [1] and not (path / contents.MARK).exists()  # so young a file may change and look the same
    monkeypatch.setattr(contents, "YOUNG_SECONDS", 0)
    lgd.Graph.open(path)
    lgd.Graph.open(path)
    assert looks == [1, 1] and (path / contents.MARK).exists()
    with pytest.raises(ValueError, match="ids lie in"):
        open_graph(path, 3)  # checked for more senders


def test_a_mark_of_other_files_counts_for_nothing(saved_whole, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(contents, "YOUNG_SECONDS", 0)
    path = tmp_path / "graph"
    shutil.copytree(saved_whole / "mine" / "graph", path)
    lgd.Graph.open(path)
    before = (path / "indices.npy").stat()
    (path / "indices.npy").chmod(0o644)
    with (path / "indices.npy").open("r+b") as file:  # in place, with the size and the time that it had
        file.seek(128 + 4 * 7)
        file.write(np.int32(10**9).tobytes())
    os.utime(path / "indices.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match=r"edge 7 comes from node 1000000000"):
        lgd.Graph.open(path)
    shutil.copytree(path, tmp_path / "copy")  # with its mark
    with pytest.raises(ValueError, match=r"edge 7 comes from node 1000000000"):
        lgd.Graph.open(tmp_path / "copy")
    written(b"{")(path / contents.MARK)
    with pytest.raises(ValueError, match=r"edge 7 comes from node 1000000000"):
        lgd.Graph.open(path)


def test_where_nobody_writes_the_mark_is_in_the_users_cache(saved_whole, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(contents, "YOUNG_SECONDS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "graph"
    shutil.copytree(saved_whole / "mine" / "graph", path)
    (path / contents.MARK).mkdir()  # nothing can be written there, whoever one is
    lgd.Graph.open(path)
    assert len(list((tmp_path / "cache" / "lightning_gnn_dist" / "checked").iterdir())) == 1
    monkeypatch.setattr(contents, "check_edges", lambda *_: pytest.fail("it was checked before"))
    lgd.Graph.open(path)


def test_files_are_read_only(saved_whole: Path) -> None:
    files = list((saved_whole / "mine").rglob("*.npy"))
    assert files and not any(file.stat().st_mode & 0o222 for file in files)


def test_a_conjugate_is_saved_as_what_it_means(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3j])
    lgd.Graph(torch.tensor([0, 1, 1]), torch.tensor([1]), {"z": z.conj()}).save(tmp_path / "graph")
    assert lgd.Graph.open(tmp_path / "graph").node_arrays["z"].tolist() == [1 - 2j, -3j]


# ``.npy`` files in pieces: the bytes that ``np.save`` writes, and no number out of a damaged file.


SAVED: list[Any] = [
    np.arange(12, dtype=np.int32),
    np.random.default_rng(0).normal(size=(5, 3)).astype(np.float16),
    np.array([True, False]),
    np.zeros((0, 4)),
]


def test_headers_tell_and_numbers_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", SAVED[1])
    file = NpyFile.of(tmp_path / "a.npy")
    assert (file.shape, file.type, file.num_bytes, file.by_column) == ((5, 3), torch.float16, 30, False)
    assert np.array_equal(file.read(4, 6), SAVED[1].reshape(-1)[4:10])
    file.path.write_bytes(file.path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"became shorter while it was read"):
        file.read(0, 15)
    with pytest.raises(ValueError, match=r"is truncated: it has 148 bytes, and its header promises 158"):
        NpyFile.of(file.path)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (50_000, 3)])
def test_what_is_saved_for_good_is_what_numpy_saves(shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.random.default_rng(0).random(shape)
    np.save(tmp_path / "by_numpy.npy", array)
    checksum = save_for_good(tmp_path / "here.npy", np.asarray(array))
    assert (tmp_path / "here.npy").read_bytes() == (tmp_path / "by_numpy.npy").read_bytes()
    assert checksum == checksum_of(tmp_path / "here.npy") == xxh64((tmp_path / "here.npy").read_bytes()).hexdigest()


def save_under_a_limit(rank: int, world_size: int, folder: Path) -> tuple[list[str], list[str]]:
    graph = Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), 60, {"x": torch.ones(60, 4)})
    said = []
    for limit in (900, 200):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            if limit == 900:
                graph.save(folder / "graph")
            else:
                cached_partition(graph, RandomPartitioner(), 2, 0, folder / "cache")
        except OSError as error:
            said.append(str(error))
    return said, sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_a_file_that_may_not_grow_is_no_success(tmp_path: Path) -> None:
    ((said, left),) = run_ranks(save_under_a_limit, 1, tmp_path)
    assert len(said) == 2 and all("a file may not grow" in sentence for sentence in said)
    assert left == ["cache"]
