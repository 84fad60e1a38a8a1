"""The best links that a server answers are those of all pairs scored and sorted by hand, also of new nodes."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnn_dist import (
    Graph,
    LinkDataModule,
    LinkSplit,
    Partition,
    best_links,
    save_shards,
    through_layers,
)
from lightning_gnn_dist.extensions.serving.links import LinkAnswerer, Ranked
from lightning_gnn_dist.extensions.serving.question import Limits, RefusedError
from tests.extensions.links.test_best_links import SAW, Films, Plain, Wrapped, film_split, known, plain_split
from tests.extensions.serving.served import Client, serving
from tests.memory import Peak, give_back_at_once, reads_memory
from tests.ranks import run_ranks

NEW_X = torch.randn(3, 6, generator=torch.Generator().manual_seed(9)).double()


def quiet() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def answerer(module: Any, split: LinkSplit, how: str = "model", *leave_out: Any, **limits: int) -> LinkAnswerer:
    data, ranked = LinkDataModule(split), Ranked(how, leave_out or ("edges", "self"), 16 << 20)  # type: ignore[arg-type]
    return LinkAnswerer(quiet(), module, data, Limits(**limits), 1000, ranked)


def by_hand(scores: Tensor, left_out: set[int], k: int) -> tuple[list[int], list[float]]:
    order = sorted((-float(score), node) for node, score in enumerate(scores) if node not in left_out)[:k]
    return [node for _, node in order], [-score for score, _ in order]


def ask(served: LinkAnswerer, *bodies: dict[str, Any]) -> list[Any]:
    found = served.answers([served.form.read(body) for body in bodies])
    return [list(zip(answer["receivers"], answer["scores"], strict=True)) for answer in found]


@pytest.mark.parametrize("how", ["model", "dot"])
def test_links_of_nodes_of_the_graph_are_those_that_best_links_finds(how: Any) -> None:
    split, names = plain_split(), ["edges", "val", "self"]
    served = answerer(Plain(), split, how, *names)
    first, second = ask(served, {"nodes": [7, 30, 7], "best_links": 4}, {"nodes": [0, 7]})
    links = best_links(quiet(), Plain(), split, senders=[7, 30, 0], score=how, leave_out=names)  # type: ignore[arg-type]
    assert links is not None
    rows = [tuple(row) for row in zip(links.receivers.tolist(), links.scores.tolist(), strict=True)]
    assert first == [tuple(part[:4] for part in rows[at]) for at in (0, 1, 0)]
    assert second == [rows[2], rows[0]]


def test_links_of_new_nodes_have_rows_of_the_extended_graph() -> None:
    """Receivers keep their rows; what a new node sends to is left out, whatever other requests bring."""
    split, module = plain_split(), Plain()
    count, sent = split.graph.num_nodes, [[NEW, 3], [NEW, 50]]
    asked = {
        "new": {"x": NEW_X[:2].tolist()},
        "edges": [*sent, [3, NEW], [8, "new:1"], ["new:1", NEW]],
        "best_links": 6,
    }
    other = {"new": {"x": NEW_X[2:].tolist()}, "edges": [[9, NEW], [NEW, 4]], "nodes": [NEW, 5], "best_links": 3}
    of_graph = module.whole(split.graph)[1]
    served = answerer(module, split)
    found, of_other = ask(served, asked, other)
    ends = torch.tensor([[count, count, 3, 8, count + 1], [3, 50, count, count + 1, count]])
    rows = whole_rows(module, split.graph, NEW_X[:2], ends)
    for number, left_out in enumerate(({3, 50}, set[int]())):
        assert found[number] == by_hand(module.decoded(rows[count + number], of_graph), left_out, 6)
    row = whole_rows(module, split.graph, NEW_X[2:], torch.tensor([[9, count], [count, 4]]))[count]
    assert of_other[0] == by_hand(module.decoded(row, of_graph), {4}, 3)
    left_out = {r for s, r in known(split, "edges", "self") if s == 5}
    assert of_other[1] == by_hand(module.decoded(of_graph[5], of_graph), left_out, 3)


NEW = "new:0"


def whole_rows(module: Plain, graph: Graph, x: Tensor, ends: Tensor) -> Tensor:
    """The rows of a graph with more nodes and edges."""
    edges: Any = graph.to_pyg().edge_index
    edges, x = torch.cat([edges, ends], 1), torch.cat([graph.node_arrays["x"], x])
    return module.last(module.first(x, edges).relu(), edges).mul(2).round().detach()


def test_a_node_that_only_receives_gets_what_best_links_of_the_extended_graph_finds() -> None:
    split, module = plain_split(), Plain()
    senders = [9, 17, 42]
    data: Any = split.graph.to_pyg()
    edges = torch.cat([data.edge_index, torch.tensor([senders, [split.graph.num_nodes] * 3])], 1)
    later = Graph.from_pyg(Data(torch.cat([data.x, NEW_X[:1]]), edges))
    links = best_links(quiet(), module, LinkSplit(later, {}, undirected=False), senders=[split.graph.num_nodes], k=7)
    asked = {"new": {"x": NEW_X[:1].tolist()}, "edges": [[node, NEW] for node in senders], "best_links": 7}
    (found,) = ask(answerer(module, LinkSplit(split.graph, {})), asked)
    assert links is not None and found == [(links.receivers[0].tolist(), links.scores[0].tolist())]


def test_links_of_an_edge_type_lead_from_new_nodes_of_the_type_that_sends() -> None:
    split, module = film_split(), Films()
    served = answerer(module, split, "model", "edges")
    new = {"user": {"x": NEW_X[:1].tolist()}, "film": {"x": NEW_X[1:2].tolist()}}
    edges = {"user__saw__film": [[NEW, 2], [NEW, NEW]], "film__rev_saw__user": [[2, NEW], [NEW, NEW]]}
    asked = {"new": new, "edges": edges | {"user__knows__user": [[5, NEW]]}, "nodes": [NEW, 3], "best_links": 100}
    (found,) = ask(served, asked)
    data: Any = split.graph.to_pyg()
    of_films = module.whole(split.graph)[1]
    more = {
        SAW: [[40, 40], [2, 9]],
        ("film", "rev_saw", "user"): [[2, 9], [40, 40]],
        ("user", "knows", "user"): [[5], [40]],
    }
    for number, kind in enumerate(("user", "film")):
        data[kind].x = torch.cat([data[kind].x, NEW_X[number : number + 1]])
    for kind, ends in more.items():
        data[kind].edge_index = torch.cat([data[kind].edge_index, torch.tensor(ends)], 1)
    hidden = {kind: x.relu() for kind, x in module.first(data.x_dict, data.edge_index_dict).items()}
    row = module.last(hidden, data.edge_index_dict)["user"].mul(2).round().detach()[40]
    assert found[0] == by_hand(module.decoded(row, of_films), {2}, 100)
    left_out = {r for s, r in known(split, "edges") if s == 3}
    assert found[1] == by_hand(module.decoded(module.whole(split.graph)[0][3], of_films), left_out, 100)


def test_a_model_of_pyg_serves_links_too() -> None:
    split, module = plain_split(), Wrapped().eval()
    edges: Any = split.graph.to_pyg().edge_index
    x, count = split.graph.node_arrays["x"], split.graph.num_nodes
    whole = module.gnn(torch.cat([x, NEW_X[:1]]), torch.cat([edges, torch.tensor([[4, 6], [count] * 2])], 1))
    scores = (module.gnn(x, edges) @ whole[count]).detach()
    (found,) = ask(answerer(module, split), {"new": {"x": NEW_X[:1].tolist()}, "edges": [[4, NEW], [6, NEW]]})
    expected = scores.sort(descending=True, stable=True).indices[:10].tolist()
    assert found[0][0] == expected and found[0][1] == pytest.approx(scores[expected].tolist(), abs=1e-9)


def test_nodes_are_named_by_ids_of_tables(tmp_path: Any) -> None:
    split, module = plain_split(), Plain()
    (tmp_path / "ids").mkdir()
    names = np.array([f"W{7 * node % 101}" for node in range(101)])
    np.save(tmp_path / "ids" / "nodes.npy", names)
    ranked = Ranked("dot", ("edges", "self"), 16 << 20)
    served = LinkAnswerer(quiet(), module, LinkDataModule(split), Limits(), 1000, ranked, tmp_path)
    plain = answerer(module, split, "dot")
    served.warm_up()
    new = {"x": NEW_X[:1].tolist()}
    by_number = {"nodes": [5, NEW], "new": new, "edges": [[9, NEW], [NEW, 4]]}
    by_name = {"nodes": [str(names[5]), NEW], "new": new, "edges": [[str(names[9]), NEW], [NEW, str(names[4])]]}
    (expected,), (found,) = ask(plain, by_number), ask(served, by_name)
    assert [([str(names[r]) for r in ids], scores) for ids, scores in expected] == found
    for wrong in (5, "W101", True, None, [5]):
        with pytest.raises(RefusedError, match="nodes must name nodes by an id of the tables, got "):
            served.form.read({"nodes": [wrong]})


def test_links_are_told_by_http_and_refused_in_one_sentence() -> None:
    split = plain_split()
    served = answerer(Plain(), split, "dot", links=20)
    with serving(served, Limits(links=20)) as (port, _):
        status, said = Client(port).post({"nodes": [3], "best_links": 2})
        assert (status, len(said["receivers"][0]), len(said["scores"][0])) == (200, 2, 2)
        for body, sentence in (
            ({"nodes": [3], "best_links": 0}, "best_links must be a count, 1 or more, got 0."),
            ({"nodes": [3], "best_links": True}, "best_links must be a count, 1 or more, got True."),
            ({"nodes": [3, 4, 5]}, "best_links may be 20 of all nodes, got 10 of 3: ask several times."),
        ):
            assert Client(port).post(body) == (400, {"error": sentence})


def test_shards_of_a_split_are_refused(tmp_path: Any) -> None:
    split = plain_split()
    save_shards(split, Partition(torch.zeros(split.graph.num_nodes).int(), 1), tmp_path / "shards")
    data = LinkDataModule(tmp_path / "shards")
    with pytest.raises(ValueError, match=r"the whole graph, and .*shards holds shards: .* --data.split=my_split,"):
        LinkAnswerer(quiet(), Plain(), data, Limits(), 1000, Ranked("dot", ("edges",), 1 << 24))


# Questions for the best links read the rows of all receivers where they lie, in bounded memory.


COUNT, WIDTH = 60_000, 64


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, WIDTH)

    def layers(self) -> Any:
        return [lambda batch: self.linear(batch.x)]

    def forward(self, batch: Any) -> Tensor:
        found, (sender, receiver) = through_layers(self, batch), batch.edge_label_index
        return (found[sender] * found[receiver]).sum(1)


def measured(rank: int, world_size: int) -> dict[str, int]:
    """The memory that a question takes where all rows take 15 MB, in RAM or in a file."""
    give_back_at_once()
    torch.manual_seed(0)
    one_way = torch.randint(0, COUNT, (2, 1000))
    edges, x = torch.cat([one_way, one_way.flip(0)], 1), torch.randn(COUNT, 2)
    data, found = LinkDataModule(LinkSplit(Graph.from_edge_index(edges, COUNT, {"x": x}), {})), dict[str, int]()
    for name, megabytes in (("ram", 128), ("file", 16)):
        how = Ranked("dot", ("edges", "self"), megabytes << 20)
        served = LinkAnswerer(quiet(), Wide(), data, Limits(), 1000, how)
        served.warm_up()
        assert served._ranking.receivers.is_file == (name == "file")
        question = served.form.read({"nodes": [3, 17]})
        served.answers([question])
        with Peak("VmRSS") as peak:
            for _ in range(20):
                served.answers([question])
        found[name] = peak.added_bytes
    return found


@reads_memory
@pytest.mark.slow
def test_a_question_takes_scores_and_no_copy_of_all_rows() -> None:
    (found,) = run_ranks(measured, 1)
    assert found["ram"] < 8 << 20 and found["file"] < 12 << 20
