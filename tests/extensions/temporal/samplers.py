"""Sampling by time, for the tests that hold for every sampler."""

import lightning_gnn_dist as lgd

SAMPLERS = {"temporal": lgd.TemporalSampler([4, 3], "chunk")}  # whose numbers are times like any
