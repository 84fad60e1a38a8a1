"""The built-in typed graph has the properties that its docstring promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import HeteroData

from lightning_gnn_dist import citations


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


def test_the_seed_decides_everything() -> None:
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


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_papers \(300\) must be at least 100 times num_fields \(4\)"):
        citations(300, 4)
