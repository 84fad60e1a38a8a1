"""What a server of a graph of a million nodes answers: how soon, how often, and under a load that misbehaves.

    python benchmarks/serve.py FOLDER [--nodes 1000000] [--edges 20000000] [--requests 10000]

FOLDER keeps the graph, which is random with 100 features, and a checkpoint of GraphSAGE with two layers. The server is
``lightning-gnn-dist serve`` on one core, drawing [15, 10] neighbours; the clients have another core. A request brings
five new nodes with 20 edges each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

FEATURES, HIDDEN, CLASSES = 100, 64, 16
NEW_NODES, EDGES_OF_NODE, DIFFERENT = 5, 20, 200
RATE, SECONDS, RUNS = 200, 5, 5
CLIENTS, BURST = 50, 400
MALFORMED = ("{", '{"nodes": ["new:0"]}', '{"nodes": [-1]}', '{"new": {"x": [[1]]}}', "[[[", '{"nodes": {}}')
CONFIG = """\
model: {{class_path: lightning_gnn_dist.cli.demo.SAGE, init_args: {{num_features: {f}, num_classes: {c}, hidden: {h}}}}}
data:
  graph: {graph}
  evaluation: {{sampler: {{class_path: lightning_gnn_dist.NeighborSampler, init_args: {{num_neighbors: [15, 10]}}}}}}
trainer: {{accelerator: cpu, devices: 1, logger: false}}
"""


class Answer(NamedTuple):
    """What a client was told."""

    status: int
    body: bytes
    seconds: float


class Client:
    """A connection that stays open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, body: str, path: str = "/predict") -> None:
        """Send a request, and do not wait for its answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        what = "POST" if body else "GET"
        head = f"{what} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        self._streams[1].write((head + body).encode())
        await self._streams[1].drain()

    async def ask(self, body: str, path: str = "/predict") -> Answer:
        """Return the answer to a request."""
        begin = time.perf_counter()
        await self.send(body, path)
        assert self._streams is not None
        head = (await self._streams[0].readuntil(b"\r\n\r\n")).decode().lower()
        (length,) = re.findall(r"content-length: (\d+)", head)
        answer = await self._streams[0].readexactly(int(length))
        if "connection: close" in head:
            self.close()
        return Answer(int(head.split()[1]), answer, time.perf_counter() - begin)

    def close(self) -> None:
        """End the connection, whatever is under way."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def requests(num_nodes: int, count: int, num_features: int = FEATURES, seed: int = 0) -> list[str]:
    """Return different requests for rows of new nodes, which send to each other, too."""
    random, found = Random(seed), []
    for _ in range(count):
        x = [[round(random.gauss(0, 1), 4) for _ in range(num_features)] for _ in range(NEW_NODES)]
        pairs = [[random.randrange(num_nodes), f"new:{i}"] for i in range(NEW_NODES) for _ in range(EDGES_OF_NODE)]
        pairs += [[f"new:{i}", f"new:{(i + 1) % NEW_NODES}"] for i in range(NEW_NODES)]
        found.append(json.dumps({"new": {"x": x}, "edges": pairs}))
    return found


def _of_server(file: str) -> list[str]:
    """Return the words of a file that Linux keeps of the server's process, without its name."""
    (server,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return Path(f"/proc/{server}/{file}").read_text().rpartition(")")[2].split()


def cpu_seconds() -> float:
    """Return the CPU seconds that the server has taken."""
    return sum(map(int, _of_server("stat")[11:13])) / os.sysconf("SC_CLK_TCK")


async def answers_to(port: int, bodies: Sequence[str]) -> list[Any]:
    """Return the answers to some requests, each asked alone."""
    client = Client(port)
    found = [json.loads((await client.ask(body)).body) for body in bodies]
    client.close()
    return found


async def share(num_clients: int, port: int, count: int, work: Callable[[Client, int], Awaitable[None]]) -> None:
    """Let some clients do work number 0, 1, ..., each one after the other."""
    numbers = iter(range(count))

    async def run() -> None:
        client = Client(port)
        for number in numbers:
            await work(client, number)
        client.close()

    await asyncio.gather(*(run() for _ in range(num_clients)))


def difference(answer: Any, known: Any) -> float:
    """Return the largest difference between the numbers of two answers."""
    pairs = zip(answer["rows"], known["rows"], strict=True)
    return max(abs(a - b) for row, other in pairs for a, b in zip(row, other, strict=True))


class Load(NamedTuple):
    """What came of a load: answers by status, wrong ones, the largest difference of a number, and clients that left."""

    statuses: Counter[int]
    wrong: int
    difference: float
    left: int


async def load(port: int, bodies: Sequence[str], known: Sequence[Any], count: int, num_clients: int = CLIENTS) -> Load:
    """Ask often and badly: one request of twenty is malformed, and one of two hundred is left before its answer."""
    statuses, differences, wrong, left = Counter[int](), [0.0], 0, 0

    async def ask(client: Client, number: int) -> None:
        nonlocal wrong, left
        is_malformed = number % 20 == 7
        at = number % len(bodies)
        if number % 200 == 13:
            await client.send(bodies[at])
            client.close()
            left += 1
            return
        answer = await client.ask(MALFORMED[number // 20 % len(MALFORMED)] if is_malformed else bodies[at])
        statuses[answer.status] += 1
        said = json.loads(answer.body)
        if answer.status == 200:
            differences.append(difference(said, known[at]))
        wrong += answer.status not in ((400,) if is_malformed else (200, 503)) or (answer.status != 200) != (
            "error" in said
        )

    await share(num_clients, port, count, ask)
    return Load(statuses, wrong, max(differences), left)


async def burst(port: int, body: str, count: int) -> Counter[int]:
    """Return the statuses of so many requests at once."""
    clients = [Client(port) for _ in range(count)]
    answers = await asyncio.gather(*(client.ask(body) for client in clients))
    for client in clients:
        client.close()
    return Counter(answer.status for answer in answers)


async def at_rate(port: int, bodies: Sequence[str], rate: int, seconds: float) -> tuple[float, list[Answer], float]:
    """Ask so often; return the answers in a second, the answers, and the CPU seconds that the server took."""
    cpu, begin, free = cpu_seconds(), time.perf_counter(), list[Client]()

    async def one(number: int) -> Answer:
        await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
        client = free.pop() if free else Client(port)
        answer = await client.ask(bodies[number % len(bodies)])
        free.append(client)
        return answer

    answers = await asyncio.gather(*(one(number) for number in range(round(rate * seconds))))
    took = time.perf_counter() - begin
    for client in free:
        client.close()
    return len(answers) / took, answers, cpu_seconds() - cpu


async def measure(port: int, num_nodes: int, count: int) -> None:
    """Print all figures."""
    bodies = requests(num_nodes, DIFFERENT)
    client, cpu = Client(port), cpu_seconds()
    first = [1000 * (await client.ask(body)).seconds for body in bodies[:50]]
    cpu = cpu_seconds() - cpu
    client.close()
    alone = f"first {first[0]:.1f} ms, median {statistics.median(first):.1f} ms, most {max(first):.1f} ms"
    print(f"one request, alone: {alone}, CPU {1000 * cpu / len(first):.2f} ms each")
    known, rates = await answers_to(port, bodies), list[float]()
    for run in range(RUNS):
        rate, answers, cpu = await at_rate(port, bodies, RATE, SECONDS)
        rates.append(rate)
        millis = sorted(1000 * answer.seconds for answer in answers)
        middle, late = millis[len(millis) // 2], millis[len(millis) * 99 // 100]
        statuses = dict(Counter(answer.status for answer in answers))
        of_each = f"{statuses}, CPU {1000 * cpu / len(answers):.2f} ms each, median {middle:.1f} ms, 99 % {late:.1f} ms"
        print(f"{RATE} requests a second, run {run + 1}: {rate:.0f} answers a second, {of_each}")
    print(f"median of {RUNS} runs: {statistics.median(rates):.0f} answers a second")
    for part in range(2):
        cpu, begin, memory = cpu_seconds(), time.perf_counter(), _megabytes()
        found = await load(port, bodies, known, count)
        took, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
        print(
            f"load {part + 1}: {count} requests of {CLIENTS} clients in {took:.0f} s, {count / took:.0f} a second, CPU "
            f"{1000 * cpu / count:.2f} ms each: {dict(found.statuses)}, {found.left} left by their clients, "
            f"{found.wrong} wrong, numbers differ by {found.difference:.1e}; memory {memory:.0f} -> "
            f"{_megabytes():.0f} MB"
        )
    print(f"a burst of {BURST}: {dict(await burst(port, bodies[0], BURST))}")


def _megabytes() -> float:
    return int(_of_server("statm")[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def make(folder: Path, num_nodes: int, num_edges: int) -> None:
    """Write the graph, the weights and the configuration."""
    import torch

    from lightning_gnn_dist import Graph
    from lightning_gnn_dist.cli.demo import SAGE

    torch.manual_seed(0)
    graph = folder / "graph"
    (folder / "fit.yaml").write_text(CONFIG.format(f=FEATURES, c=CLASSES, h=HIDDEN, graph=graph))
    torch.save({"state_dict": SAGE(FEATURES, CLASSES, HIDDEN).state_dict()}, folder / "model.ckpt")
    if graph.exists():
        return
    x, edges = torch.randn(num_nodes, FEATURES), torch.randint(0, num_nodes, (2, num_edges))
    arrays = {"x": x, "train_mask": torch.ones(num_nodes, dtype=torch.bool), "y": torch.zeros(num_nodes).long()}
    Graph.from_edge_index(edges, num_nodes, arrays).save(graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=20_000_000)
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    make(options.folder, options.nodes, options.edges)
    cores = sorted(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(cores[0]), sys.executable, "-m", "lightning_gnn_dist", "serve", "--port=0"]
    command += [f"--config={options.folder}/fit.yaml", f"--ckpt_path={options.folder}/model.ckpt"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    how: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    begin = time.perf_counter()
    with subprocess.Popen(command, **how) as server:
        assert server.stdout is not None
        try:
            said = next(line for line in server.stdout if line.startswith("Serving on"))
            print(f"{said}started in {time.perf_counter() - begin:.1f} s; load of the machine: {os.getloadavg()}")
            os.sched_setaffinity(0, {cores[-1]})
            port = int(re.findall(r"http://[\d.]+:(\d+)", said)[0])
            asyncio.run(measure(port, options.nodes, options.requests))
        finally:
            server.terminate()
        print(f"the server ended with status {server.wait(60)}")


if __name__ == "__main__":
    main()
