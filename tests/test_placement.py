"""Where batches are made never changes them."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from lightning_gnn_dist import placement
from lightning_gnn_dist.placement import Placement, lane_to, release
from lightning_gnn_dist.sampling.device import DeviceSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.shadow import ShadowSampler
from tests.sampling.reference import random_graph

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SAMPLER = NeighborSampler([2])


def test_a_cpu_keeps_the_compiled_sampler_and_needs_no_lane():
    graph = random_graph()
    for sample_on in ("auto", "cpu"):
        assert Placement(CPU, sample_on).of(graph, SAMPLER) == (graph, SAMPLER)
    assert lane_to(CPU) is None


def test_a_device_that_was_asked_for_is_used():
    graph = random_graph()
    copy, sampler = Placement(CPU, "device").of(graph, SAMPLER)
    assert sampler == DeviceSampler(SAMPLER)
    assert copy.indices.equal(graph.indices)
    assert copy.node_arrays.keys() == graph.node_arrays.keys()
    assert Placement(CPU, "device").of(graph, SAMPLER)[0] is copy


def test_a_graph_that_does_not_fit_stays_in_ram(caplog):
    graph = random_graph()
    with caplog.at_level(logging.INFO, placement.__name__):
        found = Placement(CUDA, "auto", lambda _: 2 * graph.num_bytes - 2).of(graph, SAMPLER)
    assert found == (graph, SAMPLER)
    assert "free on cuda:0 it may take 50 %" in caplog.text


def test_one_that_fits_is_copied(monkeypatch):
    graph, copies = random_graph(), []
    monkeypatch.setattr(Placement, "_copy", lambda _, one: copies.append(one) or one)
    _, sampler = Placement(CUDA, "auto", lambda _: 2 * graph.num_bytes).of(graph, SAMPLER)
    assert sampler == DeviceSampler(SAMPLER)
    assert copies == [graph]


def test_a_sampler_that_does_not_draw_there_stays_in_ram():
    graph, sampler = random_graph(), ShadowSampler([2], num_hops=1)
    assert Placement(CUDA, "auto", lambda _: 1 << 40).of(graph, sampler) == (graph, sampler)


@pytest.mark.parametrize("how", ["the graph goes", "it is released"])
def test_copies_go(how):
    graph = random_graph()
    copy = weakref.ref(Placement(CPU, "device").of(graph, SAMPLER)[0])
    assert copy() is not None
    if how == "it is released":
        release(graph)
    else:
        del graph
    gc.collect()
    assert copy() is None
