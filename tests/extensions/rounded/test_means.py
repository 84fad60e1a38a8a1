"""Which tensors of a meeting are rounded. What rounding does is in test_outer.py and test_rounded_mean.py."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightning_gnn_dist.extensions.rounded.means import Means
from lightning_gnn_dist.rounds.means.reducer import is_rounded
from tests.wire.threads import Seated, Table


def some(number: float) -> list[Tensor]:
    whole, count = torch.full((3,), int(number)), torch.tensor(number)
    return [torch.full((2, 2), number), torch.full((3,), complex(number, -number)), whole, count]


def test_counts_and_whole_numbers_are_not_rounded_and_complex_numbers_are_two() -> None:
    assert [is_rounded(each) for each in some(1.0)] == [True, True, False, False]
    table = Table(2)

    def meet(rank: int) -> list[Tensor]:
        means, (real, complex_, _, _) = Means(8), some([1.0, 5.0][rank])
        means.mean_of_rest_({"moments": [real, complex_]}, [3.0, 1.0][rank], Seated(table, rank), 0)
        return [real, complex_]

    with ThreadPoolExecutor(2) as pool:
        for real, complex_ in pool.map(meet, range(2)):
            assert torch.equal(real, some(2.0)[0]) and torch.equal(complex_, some(2.0)[1])


def test_a_member_that_is_alone_rounds_nothing_and_a_checkpoint_holds_nothing_lost() -> None:
    means, way = Means(8), torch.randn(300, dtype=torch.float64)
    own = way.clone()
    means.mean_of_rest_({"pseudo_gradients": [own]}, 1.0, Seated(Table(1), 0), 0)
    means.keep()
    assert torch.equal(own, way) and means.lost() == []
