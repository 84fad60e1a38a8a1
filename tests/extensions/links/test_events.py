"""Links in time: nothing at or after the time of a target reaches its score, wherever the batch comes from."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.graph.typed.types import EdgeType
from tests.placing import batches_of
from tests.slow import slow

SENT: EdgeType = ("user", "sent", "item")
BACK: EdgeType = ("item", "rev_sent", "user")
TIMES = 12
KINDS = pytest.mark.parametrize("kind", [None, SENT], ids=["plain", "typed"])


def events(kind: EdgeType | None, seed: int = 0, count: int = 400) -> lgd.Graph:
    """Few times and few nodes, so that pairs recur and many events are of one time. Items have times of their own."""
    draw = torch.Generator().manual_seed(seed)
    ends = torch.stack([torch.randint(n, (count,), generator=draw) for n in (20, 20 if kind is None else 15)])
    time = torch.randint(TIMES, (count,), generator=draw)
    mark = torch.arange(count)
    if kind is None:
        data = Data(edge_index=ends, num_nodes=20, x=torch.ones(20, 2), edge_time=time, edge_mark=mark)
        return lgd.Graph.from_pyg(data)
    data = HeteroData()
    data["user"].x, data["item"].x = torch.ones(20, 2), torch.ones(15, 2)
    data["item"].time = 6 * (torch.arange(15) % 4 == 3)  # some come later
    for edge_type, edges in ((SENT, ends), (BACK, ends.flip(0))):
        data[edge_type].edge_index, data[edge_type].time, data[edge_type].mark = edges, time, mark
    return lgd.Graph.from_pyg(data)


def split_of(kind: EdgeType | None, graph: lgd.Graph | None = None, **options: Any) -> lgd.LinkSplit:
    name = "edge_time" if kind is None else "time"
    defaults: dict[str, Any] = {"negatives": 4, "edge_type": kind, "time": name}
    return lgd.split_edges(events(kind) if graph is None else graph, 0.2, 0.2, **(defaults | options))


def data_of(split: lgd.LinkSplit | Path, name: str = "edge_time", **options: Any) -> lgd.LinkDataModule:
    equal = options.pop("equal", False)
    sampler = lgd.TemporalSampler([-1, -1], name, equal=equal)
    defaults: dict[str, Any] = {"sampler": sampler, "batch_size": 24, "partitioner": lgd.RandomPartitioner()}
    defaults["boundary"] = lgd.Isolated()
    return lgd.LinkDataModule(split, **(defaults | options))


def all_batches(data: lgd.LinkDataModule) -> Iterator[Any]:
    yield from chain(data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    yield from chain(data.correction_batches(3, stop=3), data.anchor_batches(2))
    part = data.part(1, 2)
    yield from batches_of(data, part, 3, 0, 1, 2)


def targets_of(batch: Any, kind: EdgeType | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ends by ids in their types, times and labels of all targets, and the trees of their ends, shape (2, m)."""
    if kind is None:
        ends = batch.edge_label_index
        return batch.n_id[ends], batch.edge_label_time, batch.edge_label, batch.batch[ends]
    store, (source, _, target) = batch[kind], kind
    sender, receiver = store.edge_label_index
    ids = torch.stack([batch[source].n_id[sender], batch[target].n_id[receiver]])
    trees = torch.stack([batch[source].batch[sender], batch[target].batch[receiver]])
    return ids, store.edge_label_time, store.edge_label, trees


def edges_of(batch: Any, kind: EdgeType | None) -> Iterator[tuple[Any, Any, Tensor]]:
    """Of each type of edges the nodes that receive, the edges, and their times."""
    for store in [batch] if kind is None else batch.edge_stores:
        nodes = batch if kind is None else batch[store._key[2]]
        yield nodes, store, store.edge_time if kind is None else store.time


def seen(batch: Any, kind: EdgeType | None) -> Iterator[tuple[int, int, int, tuple[str, int]]]:
    """Of each message its tree, mark, time, and type and id of the node that receives."""
    for nodes, store, time in edges_of(batch, kind):
        rows, mark = store.edge_index[1], store.edge_mark if kind is None else store.mark
        receivers = [("" if kind is None else store._key[2], i) for i in nodes.n_id[rows].tolist()]
        yield from zip(nodes.batch[rows].tolist(), mark.tolist(), time.tolist(), receivers, strict=True)


def senders_of(graph: lgd.Graph, kind: EdgeType | None) -> dict[Any, list[Any]]:
    """For each node that receives the messages to it: who sends, the mark, and the time."""
    data, found = graph.to_pyg(), defaultdict(list)
    stores = {("", "", ""): data} if kind is None else dict(data.edge_items())
    for (source, _, target), store in stores.items():
        mark, when = (store.edge_mark, store.edge_time) if kind is None else (store.mark, store.time)
        for s, r, m, t in zip(*store.edge_index.tolist(), mark.tolist(), when.tolist(), strict=True):
            found[target, r].append(((source, s), m, t))
    return found


def by_hand(
    senders: dict[Any, list[Any]], root: tuple[str, int], time: int, *, asked: Any
) -> tuple[Counter[Any], set[tuple[str, int]]]:
    """All messages of two hops into a node that are earlier than a time, and the nodes that receive them.

    With ``asked`` those of that time, too, but not between these ends.
    """

    def is_seen(s: Any, r: Any, t: int) -> bool:
        return t < time or (asked is not None and t == time and {s, r} not in asked)

    reached = {root} | {s for s, _, t in senders[root] if is_seen(s, root, t)}
    return Counter((m, t, r) for r in reached for s, m, t in senders[r] if is_seen(s, r, t)), reached


SIGHTS = [(None, False, 0), (SENT, True, 1), slow(None, True, 1), slow(SENT, False, 0)]


@pytest.mark.parametrize(("kind", "equal", "seed"), SIGHTS)
def test_each_end_sees_what_was_before_its_target_and_no_more(kind: EdgeType | None, equal: bool, seed: int) -> None:
    graph = events(kind, seed)
    data = data_of(split_of(kind, graph), "edge_time" if kind is None else "time", equal=equal)
    first, last = ("", "") if kind is None else (kind[0], kind[2])
    senders = senders_of(graph, kind)
    for batch in chain(data.train_dataloader(), data.test_dataloader(), data.correction_batches(1, stop=2)):
        ids, times, labels, trees = targets_of(batch, kind)
        messages: dict[int, Counter[Any]] = {}
        for tree, mark, time, receiver in seen(batch, kind):
            messages.setdefault(tree, Counter())[mark, time, receiver] += 1
        asked: dict[int, list[Any]] = {}
        for (s, r), (one, other) in zip(ids.T.tolist(), trees.T.tolist(), strict=True):
            for tree in (one, other):
                asked.setdefault(tree, []).append({(first, s), (last, r)})
        for i, time in enumerate(times.tolist()):
            for end, name in ((0, first), (1, last)):
                tree, root = int(trees[end, i]), (name, int(ids[end, i]))
                expected, reached = by_hand(senders, root, time, asked=asked[tree] if equal else None)
                found = messages.get(tree, Counter())
                if equal:  # what an edge that is hidden led to stays, and nothing leads from there to the root
                    found = Counter({message: n for message, n in found.items() if message[2] in reached})
                assert found == expected
        assert labels.sum() > 0


@KINDS
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_no_event_at_or_after_the_time_of_a_target_reaches_its_score(kind: EdgeType | None, seed: int) -> None:
    graph, name = events(kind, seed), "edge_time" if kind is None else "time"
    num_messages = 0
    for batch in all_batches(data_of(split_of(kind, graph), name)):
        _, times, _, trees = targets_of(batch, kind)
        latest = torch.full((int(trees.max()) + 1,), -1)
        for tree, _, time, _ in seen(batch, kind):
            latest[tree], num_messages = max(int(latest[tree]), time), num_messages + 1
        assert bool((latest[trees] < times).all())
        seed_time = batch.seed_time if kind is None else batch[kind].seed_time
        assert seed_time[trees].equal(times.expand(2, -1))
    assert num_messages > 1000


@KINDS
def test_the_last_events_are_held_and_each_is_asked_for_once(kind: EdgeType | None) -> None:
    graph, name = events(kind), "edge_time" if kind is None else "time"
    split = split_of(kind, graph)
    whole = graph.to_pyg() if kind is None else graph.to_pyg()[kind]
    when = whole[name]
    held = [split.held_arrays[part][name] for part in ("val", "test")]
    assert split.graph.num_edges == graph.num_edges and int(held[0].max()) < int(held[1].min())
    loops = whole.edge_index[0] == whole.edge_index[1] if kind is None else torch.zeros_like(when, dtype=torch.bool)
    ends = [
        list(map(tuple, torch.cat([split.edges[p], split.held_arrays[p][name][None]]).T.tolist())) for p in split.edges
    ]
    first = min(time for part in ends for *_, time in part)
    everything = [
        (s, r, t) for (s, r), t, loop in zip(whole.edge_index.T.tolist(), when.tolist(), loops, strict=True) if not loop
    ]
    assert Counter(chain(*ends)) == Counter(event for event in everything if event[2] >= first)
    asked: Counter[Any] = Counter()
    for batch in data_of(split, name).train_dataloader():
        ids, times, label, _ = targets_of(batch, kind)
        events_asked = zip(ids.T.tolist(), times.tolist(), label, strict=True)
        asked.update((*pair, t) for pair, t, is_true in events_asked if is_true)
    assert asked == Counter(event for event in everything if event[2] < first)


@KINDS
def test_negatives_were_there_and_got_nothing_from_the_sender_at_that_time(kind: EdgeType | None) -> None:
    graph, name = events(kind), "edge_time" if kind is None else "time"
    data = data_of(split_of(kind, graph), name, num_negatives=3)
    whole = graph.to_pyg() if kind is None else graph.to_pyg()[kind]
    happened = set(zip(*whole.edge_index.tolist(), whole[name].tolist(), strict=True))
    drawn = set()
    for batch in all_batches(data):
        ids, times, label, _ = targets_of(batch, kind)
        for (sender, receiver), time, is_true in zip(ids.T.tolist(), times.tolist(), label, strict=True):
            if is_true:
                assert (sender, receiver, time) in happened
                continue
            drawn.add(receiver)
            assert (sender, receiver, time) not in happened and (kind is not None or sender != receiver)
            assert kind is None or receiver % 4 != 3 or time >= 6
        count = int(label.sum())
        assert times[count:].view(count, -1).equal(times[:count, None].expand(-1, (len(times) - count) // count))
    assert len(drawn) > 12


@KINDS
def test_labels_in_time(kind: EdgeType | None) -> None:
    graph, name = events(kind), "edge_time" if kind is None else "time"
    arrays = graph.edge_arrays if kind is None else graph.types.edge_arrays[kind]  # type: ignore[union-attr]
    label, mark = ("edge_rating", "edge_mark") if kind is None else ("rating", "mark")
    arrays[label] = torch.where(arrays[mark] % 5 == 0, float("nan"), arrays[mark].float())  # type: ignore[index]
    if kind is not None:
        graph.types.edge_arrays[BACK][label] = graph.types.edge_arrays[BACK]["mark"].float()  # type: ignore[union-attr,index]
    data = data_of(split_of(kind, graph, labels=label, negatives=None), name)
    asked = Counter[int]()
    for batch in chain(data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        targets = batch if kind is None else batch[kind]
        assert targets.edge_label.long().equal(targets.edge_label_mark)
        assert not any(label in store for store in batch.stores)
        asked.update(targets.edge_label_mark.tolist())
    assert asked == Counter(m for m in range(400) if m % 5)


def own_split(split: lgd.LinkSplit, **options: Any) -> lgd.LinkSplit:
    defaults: dict[str, Any] = {"edges": split.edges, "held_arrays": split.held_arrays, "time": "edge_time"}
    defaults["negatives"] = {} if "labels" in options else split.negatives
    return lgd.LinkSplit(split.graph, **(defaults | options))


def test_what_cannot_work_is_refused() -> None:
    split, random = split_of(None), lgd.split_edges(events(None), negatives=2)
    times = {name: of["edge_time"] for name, of in split.held_arrays.items()}
    turned = {name: {"edge_time": TIMES - rows} for name, rows in times.items()}
    edge, time, false = split.edges["val"][:, -1:], times["val"][-1:], split.negatives["val"][-1:]
    with_one_more = {
        "edges": split.edges | {"test": torch.cat([split.edges["test"], edge], 1)},
        "negatives": split.negatives | {"test": torch.cat([split.negatives["test"], false])},
        "held_arrays": split.held_arrays | {"test": {"edge_time": torch.cat([times["test"], time])}},
    }
    for made, message in (
        (lambda: data_of(split, sampler=lgd.NeighborSampler([2, 2])), r"edges of all times \(edge_time\), and"),
        (lambda: data_of(split, "other"), "take TemporalSampler.*time='edge_time'"),
        (lambda: data_of(split, sampler=lgd.TemporalSampler([2], "edge_time", "time")), "leave seed_time out of"),
        (lambda: data_of(random), "split holds them back at random"),
        (lambda: split_of(None, labels="edge_time", negatives=None), "labels and time both name 'edge_time'"),
        (lambda: own_split(split, labels="edge_time"), "labels and time both name 'edge_time'"),
        (lambda: own_split(split, held_arrays=turned), r"val has events until edge_time=\d+, and test from \d+ on"),
        (lambda: own_split(split, **with_one_more), r"share edges of the same ends and edge_time \(1 of val\)"),
        (lambda: split_of(None, time="time"), "time names 'time', and edges carry no array of that name"),
    ):
        with pytest.raises(ValueError, match=message):
            made()
    data = events(SENT).to_pyg()
    del data[BACK].time
    with pytest.raises(ValueError, match=r"have no array 'time', so that events would be seen there before"):
        split_of(SENT, lgd.Graph.from_pyg(data))
    data[BACK].time = data[SENT].time.flip(0)
    some = events(SENT).to_pyg()
    back, own = some[BACK].edge_index, some[SENT]
    del some[BACK]
    some["item", "seen_by", "user"].edge_index = back[:, :180]  # fewer than half, and without times
    with pytest.raises(ValueError, match=r"seen_by.* have no array 'time', .*reverse=None"):
        split_of(SENT, lgd.Graph.from_pyg(some))
    made = split_of(SENT, lgd.Graph.from_pyg(some), reverse=None)
    with pytest.raises(ValueError, match=r"seen_by.* have no array 'time'"):
        lgd.LinkSplit(made.graph, made.edges, made.negatives, edge_type=SENT, time="time", held_arrays=made.held_arrays)
    some["item", "seen_by", "user"].time = own.time[:180]
    split_of(SENT, lgd.Graph.from_pyg(some))
    with pytest.raises(ValueError, match="turned round, and have other times"):
        split_of(SENT, lgd.Graph.from_pyg(data))
    assert data_of(split, sampler=None).sampler == lgd.TemporalSampler([15, 10], "edge_time")
