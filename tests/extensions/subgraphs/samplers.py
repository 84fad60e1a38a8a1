"""Walks and shadows, for the tests that hold for every sampler."""

import lightning_gnn_dist as lgd

SAMPLERS = {"walk": lgd.RandomWalkSampler(2, visits=4), "shadow": lgd.ShadowSampler([4, 2], num_hops=2)}
TWO_HOPS = [lgd.RandomWalkSampler(2, visits=0), lgd.ShadowSampler([3, 2], num_hops=2)]
INDUCED = [
    lgd.RandomWalkSampler(2, walk_length=3, visits=0),
    lgd.RandomWalkSampler(3, walk_length=3, visits=2),
    lgd.RandomWalkSampler(1, walk_length=3, visits=0),
]
APART = [lgd.ShadowSampler([4, 2], num_hops=3), lgd.ShadowSampler([-1], num_hops=1)]
LARGE = [lgd.RandomWalkSampler(2, walk_length=3, visits=0), lgd.ShadowSampler([12, 5], 2)]
WEIGHED = [lgd.RandomWalkSampler(2, visits=2)]
