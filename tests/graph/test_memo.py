"""What is remembered of a graph."""

import gc
import os
import threading
import time
import weakref

import pytest
import torch

from lightning_gnn_dist import Graph
from lightning_gnn_dist.graph.memo import memory_of, of_all_graphs, remembered


def chain():
    return Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)


def test_two_threads_find_out_once_and_other_keys_apart():
    graph, found = chain(), []

    def find():
        found.append(threading.get_ident())
        time.sleep(0.05)
        return len(found)

    values = []
    threads = [threading.Thread(target=lambda: values.append(remembered(graph, "a", find))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [1, 1, 1]
    assert len(found) == 1
    assert remembered(graph, "b", find) == 2
    assert remembered(chain(), "a", find) == 3


def test_finding_out_may_need_something_else_of_the_same_graph():
    graph = chain()
    assert remembered(graph, "outer", lambda: remembered(graph, "inner", lambda: 3) + 1) == 4


def test_what_is_remembered_goes_with_the_graph():
    graph = chain()
    value = remembered(graph, "tensor", lambda: torch.ones(3))
    assert [found for _, found in of_all_graphs("tensor")] == [value]
    value, held = None, weakref.ref(value)
    del graph
    gc.collect()
    assert held() is None
    assert of_all_graphs("tensor") == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have():
    graph, holds, done = chain(), threading.Event(), threading.Event()

    def hold():
        with memory_of(graph):
            holds.set()
            done.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(30)
    if (child := os.fork()) == 0:
        os._exit(remembered(graph, "a", lambda: 7))
    deadline, code = time.monotonic() + 60, 0
    while time.monotonic() < deadline and not (status := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.01)
    if status[0]:
        code = os.waitstatus_to_exitcode(status[1])
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    done.set()
    thread.join()
    assert code == 7
