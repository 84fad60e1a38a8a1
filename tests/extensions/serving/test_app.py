"""The server: rows, refusals in one sentence, a queue that is full, time that is over, and its end."""

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import PartitionedDataModule, communities
from lightning_gnn_dist.extensions.serving.app import listen
from lightning_gnn_dist.extensions.serving.question import Limits
from lightning_gnn_dist.wire.addresses import held_port
from tests.extensions.serving.models import MODELS, WIDTH, OnBlocks, answerer, double, ends_of, plain_graph
from tests.extensions.serving.served import Client, serving
from tests.pages import ROOT, blocks, write_files
from tests.python_server import fast_python

NODES = 60
PATIENCE = 60.0  # seconds, more than anything takes


def data_of_nodes(**edge_arrays: Tensor) -> PartitionedDataModule:
    return PartitionedDataModule(plain_graph(ends_of(NODES, 300), double(NODES, WIDTH), **edge_arrays))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    limits = Limits(nodes=8, new_nodes=4, edges=20, bytes=2000, seconds=PATIENCE)
    with serving(answerer(MODELS["SAGE"](), data_of_nodes(), nodes=8, new_nodes=4, edges=20), limits) as (port, _):
        yield port


def test_rows_are_told_with_all_digits(port: int) -> None:
    status, said = Client(port).post({"nodes": [3, 5]})
    rows = MODELS["SAGE"]().rows(double(NODES, WIDTH), ends_of(NODES, 300))[[3, 5]]
    assert status == 200
    torch.testing.assert_close(torch.tensor(said["rows"], dtype=torch.float64), rows.detach(), rtol=0, atol=1e-12)


X = [0.5, 1, -2, 3]
MALFORMED = [
    ("", "The body must be JSON: Expecting value: line 1 column 1 (char 0)."),
    ('{"nodes": [NaN]}', "The body must be JSON: NaN is no number."),
    ("\xff{", "The body must be JSON: "),
    ("[" * 1900, "The body is nested too deep"),
    ([1], "The request must be an object with ['type', 'nodes', 'new', 'edges'], got [1]."),
    ({"node": [1]}, "The request may have ['type', 'nodes', 'new', 'edges'], got 'node'."),
    ({"type": "paper"}, "type is for a graph with types, and this one has none, got 'paper'."),
    ({}, 'nodes must name a node at least, such as {"nodes": [0]}, got none.'),
    ({"nodes": 3}, "nodes must be a list, got 3."),
    ({"nodes": [60]}, "nodes must name nodes by an id from 0 to 59, got 60."),
    ({"nodes": ["new:0"]}, "nodes must name nodes by an id from 0 to 59, as the request has no new ones, got 'new:0'."),
    ({"nodes": [*range(9)]}, "nodes may have 8 entries, got 9: ask several times."),
    ({"new": {"y": [1]}}, "new may have ['x', 'num_nodes'], got 'y'."),
    ({"new": {"x": 7}}, "x of new must be a list with a row for each node, got 7."),
    ({"new": {"num_nodes": -1}}, "num_nodes of new must be a count, got -1."),
    ({"new": {"num_nodes": 1}}, "new must have 'x', as the graph has it: give a row for each."),
    ({"new": {"x": [X], "num_nodes": 2}}, "new must have as many rows of each array, got {'num_nodes': 2, 'x': 1}."),
    ({"new": {"x": [X] * 5}}, "new may have 4 nodes, got 5: ask several times."),
    ({"new": {"x": [X[:3]]}}, "x of new must be finite numbers of shape [1, 4], got [[0.5, 1, -2]] of shape [1, 3]."),
    ({"new": {"x": [X, X[:3]]}}, "x of new must be finite numbers of shape [2, 4], got [[0.5, 1, -2, 3], [0.5, 1, "),
    ('{"new": {"x": [[1e999, 1, 2, 3]]}}', "x of new must be finite numbers that torch.float64 can hold"),
    ({"new": {"x": [X]}, "edges": [[3]]}, "edges must be pairs of a sender and a receiver, got [3]."),
    ({"new": {"x": [X]}, "edges": [[3, 4]]}, "edges must have a new node at one end, got [3, 4]: both are of the"),
    ({"new": {"x": [X]}, "edges": [[3, "new:1"]]}, 'edges must name nodes by an id from 0 to 59, or "new:0", got'),
    ({"new": {"x": [X]}, "edges": [[3, "new:0"]] * 21}, "edges may have 20 entries, got 21: ask several times."),
    ({"new": {"x": [X]}, "edges": [["new:0", v] for v in range(9)]}, "edges may be 20 with those of the graph into"),
]


@pytest.mark.parametrize(("body", "sentence"), MALFORMED)
def test_a_malformed_request_is_refused_in_one_sentence(port: int, body: Any, sentence: str) -> None:
    status, said = Client(port).post(body.encode("latin-1") if isinstance(body, str) else body)
    assert (status, said["error"][: len(sentence)]) == (400, sentence)


def test_what_is_asked_elsewhere_is_told_where_to_ask(port: int) -> None:
    said = "Ask by POST /predict or GET /health, got "
    assert Client(port).post({"nodes": [3]}, "/rows") == (404, {"error": said + "'POST /rows'."})
    client = Client(port)
    assert client.get("/predict") == (405, {"error": said + "'GET /predict'."})
    assert client.response.headers["Allow"] == "POST"


def test_a_body_that_is_too_large_is_not_read(port: int) -> None:
    assert Client(port).post("[" + "1," * 2000 + "1]") == (
        413,
        {"error": "The body of a request may have 2000 bytes: ask several times."},
    )


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with serving(answerer(MODELS["SAGE"](), data_of_nodes()), Limits(seconds=0.2)) as (port, _):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as slow:
            slow.sendall(b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n[1")
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        wait_until(lambda: Client(port).post({"nodes": [3]})[0] == 200)


def test_its_health_is_told(port: int) -> None:
    said = {"status": "ready", "waiting": 0, "model": "OnBlocks", "nodes": NODES}
    assert Client(port).get("/health")[1].items() >= said.items()


def wait_until(it_holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not it_holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_line(port: int, length: int) -> None:
    """Wait until so many requests wait behind the ones that are computed."""
    wait_until(lambda: Client(port).get("/health")[1]["waiting"] == length)


class Held(OnBlocks):
    """Computes once it may, and fails on nodes whose first feature is 13."""

    def __init__(self) -> None:
        super().__init__(SAGEConv)
        self.may, self.begun = threading.Event(), threading.Event()

    def forward(self, batch: Any) -> Tensor:
        self.begun.set()
        assert self.may.wait(PATIENCE)
        if (batch.x[:, 0] == 13).any():
            raise IndexError("13")
        return super().forward(batch)


def test_what_is_too_much_is_told_so_and_nothing_is_lost() -> None:
    model, limits = Held(), Limits(waiting=2, seconds=PATIENCE)
    with serving(answerer(model, data_of_nodes()), limits) as (port, _), ThreadPoolExecutor(8) as clients:
        ask = lambda nodes: clients.submit(lambda: Client(port).post({"nodes": nodes}))  # noqa: E731
        first = ask([1])
        assert model.begun.wait(PATIENCE)
        waiting = [ask([2]), ask([3])]
        wait_for_line(port, 2)
        client = Client(port)
        assert client.post({"nodes": [4]}) == (503, {"error": "2 requests wait already: ask again later."})
        assert client.response.headers["Retry-After"] == "1"
        model.may.set()
        assert [future.result()[0] for future in (first, *waiting)] == [200] * 3
        assert client.post({"nodes": [4]})[0] == 200


def test_what_is_too_late_is_told_so_and_later_requests_are_answered() -> None:
    model = Held()
    with serving(answerer(model, data_of_nodes()), Limits(seconds=1.0)) as (port, _), ThreadPoolExecutor(8) as clients:
        late = [clients.submit(lambda node=node: Client(port).post({"nodes": [node, 9]})) for node in (1, 2, 3)]
        said = (504, {"error": "The request was not answered within 1 s."})
        assert [future.result() for future in late] == [said] * 3
        model.may.set()
        wait_until(lambda: Client(port).post({"nodes": [4]})[0] == 200)


def test_a_request_on_which_the_model_fails_spoils_no_other() -> None:
    model = Held()
    limits = Limits(seconds=PATIENCE)
    with serving(answerer(model, data_of_nodes()), limits) as (port, _), ThreadPoolExecutor(8) as clients:
        post = lambda body: clients.submit(lambda: Client(port).post(body))  # noqa: E731
        first = post({"nodes": [1]})
        assert model.begun.wait(PATIENCE)
        bad = post({"new": {"x": [[13, 0, 0, 0]]}})
        good = [post({"nodes": [node]}) for node in (2, 3)]
        wait_for_line(port, 3)
        model.may.set()
        rows = MODELS["SAGE"]().rows(double(NODES, WIDTH), ends_of(NODES, 300))
        assert bad.result() == (500, {"error": "The model failed on this request: the server's log says how."})
        for node, future in zip((1, 2, 3), [first, *good], strict=True):
            status, said = future.result()
            assert status == 200 and said["rows"][0] == pytest.approx(rows[node].tolist(), abs=1e-12)


def test_at_its_end_a_server_answers_what_it_took_and_takes_nothing_new() -> None:
    model = Held()
    limits = Limits(seconds=PATIENCE)
    with serving(answerer(model, data_of_nodes()), limits) as (port, server), ThreadPoolExecutor(2) as clients:
        ask = lambda node: clients.submit(lambda: Client(port).post({"nodes": [node]}))  # noqa: E731
        taken = [ask(1)]
        assert model.begun.wait(PATIENCE)
        taken.append(ask(2))
        wait_for_line(port, 1)
        server.handle_exit(15, None)
        wait_until(lambda: is_refused(port))
        model.may.set()
        assert [future.result()[0] for future in taken] == [200, 200]


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_body_does_not_wait_for_its_head() -> None:
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()) as client:
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        assert client.recv(1) == b""
        taken = listening.getsockname()[1]
        with pytest.raises(ValueError, match=rf"host '127.0.0.1' and port {taken} cannot be had \(Address"):
            listen("127.0.0.1", taken)


# The page "From training to predictions", from its first line to its last.


PORT = 8000  # the page's


def command_lines() -> list[str]:
    text = "".join(block.code for block in blocks("console", "serving")).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]


def is_ready(open_port: int, server: subprocess.Popen[bytes]) -> bool:
    for _ in range(600):
        try:
            return bool(Client(open_port).get("/health")[0] == 200)
        except OSError:
            assert server.poll() is None
            time.sleep(0.2)
    return False


@pytest.fixture
def open_port() -> Iterator[int]:
    with held_port() as open_port:
        yield open_port


@pytest.mark.slow
def test_the_page_leads_from_a_fit_to_the_same_rows_by_file_and_by_http(tmp_path: Path, open_port: int) -> None:
    communities(2000, 8, num_features=64).save(tmp_path / "my_graph")
    write_files(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    how: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    pythons = [fast_python(), fast_python(), sys.executable, ""]  # the server is sent a signal
    fit, predict, serve, curl = (
        line.replace("lightning-gnn-dist", f"{python} -m lightning_gnn_dist").replace(str(PORT), str(open_port))
        for line, python in zip(command_lines(), pythons, strict=False)
    )
    for line in (fit, predict):
        subprocess.run(["bash", "-c", line], check=True, timeout=600, **how)
    with subprocess.Popen(["bash", "-c", f"exec {serve}"], **how) as server:
        try:
            assert is_ready(open_port, server)
            said = subprocess.run(shlex.split(curl), capture_output=True, check=True, timeout=60)
            (block,) = [block.code for block in blocks("python", "serving") if "urlopen" in block.code]
            scope: dict[str, Any] = {}
            exec(block.replace(str(PORT), str(open_port)), scope)
        finally:
            server.terminate()
        assert server.wait(60) == 0
    rows = torch.tensor(json.loads(said.stdout)["rows"])
    torch.testing.assert_close(rows, torch.from_numpy(np.load(tmp_path / "some.npy")), rtol=0, atol=1e-4)
    assert np.array(scope["rows"]).shape == (3, 8) and "--nodes 3,141,59 " in predict
