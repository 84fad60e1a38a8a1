"""The built-in graph has the properties that its docstring promises."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import HeteroData

from lightning_gnn_dist import citations, communities


def test_the_seed_decides_everything() -> None:
    first, again, other = communities(500, 4), communities(500, 4), communities(500, 4, seed=1)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(first.node_arrays["x"], again.node_arrays["x"])


def test_edges_are_symmetric_distinct_and_mostly_inside_communities() -> None:
    graph = communities(4000, 5, homophily=0.8)
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    sender = graph.indices.long()
    forth, back = sender * 4000 + receiver, receiver * 4000 + sender
    assert torch.equal(forth.sort().values, back.sort().values)
    assert forth.unique().numel() == graph.num_edges and not (sender == receiver).any()
    label = graph.node_arrays["y"]
    assert (label[sender] == label[receiver]).float().mean() == pytest.approx(0.8 + 0.2 / 5, abs=0.03)
    assert graph.num_edges / 4000 == pytest.approx(10, rel=0.1)


def test_every_node_is_in_one_split() -> None:
    graph = communities(1000, train_share=0.2)
    masks = torch.stack([graph.node_arrays[f"{name}_mask"] for name in ("train", "val", "test")]).int()
    assert masks.sum(0).eq(1).all() and masks.sum(1).tolist() == [200, 400, 400]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="at least twice"):
        communities(5, 8)


def test_a_graph_that_no_machine_holds_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="So large a graph would take"):
        communities(1000, 2, num_features=10**9)


def mean_of_senders(data: HeteroData, edge_type: tuple[str, str, str]) -> Tensor:
    sender, receiver = data[edge_type].edge_index
    count = data[edge_type[2]].num_nodes
    total = torch.zeros(count, data[edge_type[0]].x.shape[1]).index_add_(0, receiver, data[edge_type[0]].x[sender])
    return total / torch.bincount(receiver, minlength=count).clamp(min=1)[:, None]


def accuracy(data: HeteroData, *features: Tensor) -> float:
    """Of a linear model by least squares, on the papers to test on."""
    papers, x = data["paper"], torch.cat([*features, torch.ones(data["paper"].num_nodes, 1)], 1).double()
    weights = torch.linalg.lstsq(x[papers.train_mask], one_hot(papers.y[papers.train_mask]).double()).solution
    return float(((x[papers.test_mask] @ weights).argmax(1) == papers.y[papers.test_mask]).float().mean())


def test_the_seed_decides_every_type() -> None:
    first, again, other = citations(800, 4), citations(800, 4), citations(800, 4, seed=1)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    first.check_edges()


def test_types_and_edges_tell_what_features_do_not() -> None:
    data = citations(4000).to_pyg()
    assert isinstance(data, HeteroData) and len(data.node_types) == 4 and len(data.edge_types) == 8
    cites, disputes = (mean_of_senders(data, ("paper", name, "paper")) for name in ("cites", "disputes"))
    authors, own = mean_of_senders(data, ("author", "writes", "paper")), data["paper"].x
    found = [accuracy(data, own, *more) for more in ([], [(cites + disputes) / 2], [cites, disputes, authors])]
    assert found[0] + 0.1 < found[1] < found[2] - 0.1


def test_papers_name_earlier_ones_and_edges_have_their_day() -> None:
    graph = citations(800, 4)
    data = graph.to_pyg()
    sender, receiver = data["paper", "disputes", "paper"].edge_index
    assert (sender < receiver).all() and (data["paper"].time.diff() >= 0).all()
    assert torch.equal(data["paper", "disputes", "paper"].time, data["paper"].time[receiver])
    sender, receiver = data["paper", "rev_writes", "author"].edge_index
    assert torch.equal(data["paper", "rev_writes", "author"].time, data["paper"].time[sender])
    of_one = (receiver[1:] == receiver[:-1]).nonzero().view(-1)
    assert (data["paper", "rev_writes", "author"].time.diff()[of_one] >= 0).all()


def test_too_few_papers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_papers \(300\) must be at least 100 times num_fields \(4\)"):
        citations(300, 4)
