"""Coverage against its definition, written out node by node."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist import Coverage, Graph, communities, coverage_mean

NAN = float("nan")


def by_definition(part: Graph, degrees: list[int], kappa: float, prior: float) -> list[float]:
    pairs = zip(part.degrees().tolist(), degrees, strict=True)
    return [(here + kappa * prior) / (all_of + kappa) if all_of else 1.0 for here, all_of in pairs]


@pytest.mark.parametrize(("kappa", "prior"), [(0.0, 0.0), (1.0, 0.0), (2.5, 0.4)])
def test_coverage_is_the_share_of_the_neighbourhood_that_is_visible(kappa: float, prior: float) -> None:
    graph = communities(300, 3, num_features=4, seed=1)
    nodes = torch.arange(0, 300, 2)
    part, degrees = graph.induced(nodes), graph.degrees()[nodes]
    covered = Coverage(shrinkage=kappa, prior=prior).of(part, degrees, 100)
    expected = torch.tensor(by_definition(part, degrees.tolist(), kappa, prior))
    assert torch.allclose(covered, expected, atol=1e-6)
    assert float(covered.min()) >= 0
    assert float(covered.max()) <= 1


def test_by_default_it_shrinks_to_the_mean_of_the_own_nodes() -> None:
    graph = communities(300, 3, num_features=4, seed=1)
    nodes = torch.arange(0, 300, 2)
    part, degrees = graph.induced(nodes), graph.degrees()[nodes]
    mean = float(Coverage().of(part, degrees, 150)[:100].mean())
    shrunk = Coverage(shrinkage=3).of(part, degrees, 100)
    assert torch.allclose(shrunk, Coverage(shrinkage=3, prior=mean).of(part, degrees, 100))


def batch(coverage: Tensor | None) -> Data:
    data = Data(batch_size=3, num_nodes=4)
    if coverage is not None:
        data.coverage = coverage
    return data


@pytest.mark.parametrize(
    ("coverage", "mean"),
    [(None, 2.0), ([1.0, 1.0, 1.0, 0.0], 2.0), ([0.0, 0.5, 0.5, 9.0], 2.5), ([0.0, 0.0, 0.0, 1.0], 2.0)],
)
def test_the_mean_weighs_seeds(coverage: Any, mean: float) -> None:
    losses = torch.tensor([1.0, 2.0, 3.0])
    assert float(coverage_mean(losses, batch(None if coverage is None else torch.tensor(coverage)))) == mean


def test_a_batch_that_fills_a_pass_up_has_a_mean_of_nothing() -> None:
    losses, filler = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), batch(torch.zeros(4))
    filler.is_filler = True
    result = coverage_mean(losses, filler)
    result.backward()  # ranks step together, so there is a gradient
    assert float(result.detach()) == 0.0 and not losses.grad.any()


def test_a_mean_or_too_many_losses_are_refused() -> None:
    for losses in (torch.tensor(1.0), torch.ones(4)):
        with pytest.raises(ValueError, match=r'one loss per seed, 3 in this batch.*reduction="none"'):
            coverage_mean(losses, batch(None))


@pytest.mark.parametrize(
    ("coverage", "message"),
    [
        (torch.ones(1), "a vector of a weight for each seed"),
        (torch.ones(3, 2), "a vector of a weight for each seed"),
        (torch.tensor([1.0, NAN, 1.0]), "negative, infinite or NaN"),
        (torch.tensor([1.0, float("inf"), 1.0]), "negative, infinite or NaN"),
        (torch.tensor([1.0, -0.5, 1.0]), "negative, infinite or NaN"),
        ([1.0, 1.0, 1.0], "must be a tensor of a weight"),
    ],
)
def test_weights_that_weigh_nothing_are_refused(coverage: Any, message: str) -> None:
    batch = Data(batch_size=3, coverage=coverage, num_nodes=3)
    with pytest.raises((ValueError, TypeError), match=message):
        coverage_mean(torch.ones(3), batch)


def test_degrees_of_another_graph_are_refused() -> None:
    graph = communities(300, 3, num_features=4, seed=1)
    with pytest.raises(ValueError, match=r"degrees must count .* node 0 of the part has \d+ and degrees says 0"):
        Coverage().of(graph, torch.zeros(300, dtype=torch.int64), 300)


def test_a_rank_without_nodes_of_its_own_has_weights_all_the_same() -> None:
    graph = communities(300, 3, num_features=4, seed=1)
    assert Coverage().of(graph.induced(torch.arange(9)), graph.degrees()[:9], 0).isfinite().all()
