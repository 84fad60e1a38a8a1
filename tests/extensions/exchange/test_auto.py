"""What boundary="auto" chooses where a user allows an exchange, and keeps in a resumed fit."""

from pathlib import Path
from typing import Any

from lightning_gnn_dist import Auto, Coverage, Exchange, Halo
from tests.boundary.models import model, weighted_data, weights_of
from tests.boundary.test_auto import NEIGHBORS, PARTS, STRATEGIES, bytes_of_parts, cut_graph
from tests.extensions.exchange.test_exchange import check, data_of, quick
from tests.layers.models import graph_of
from tests.ranks import run_ranks
from tests.strategies.fitting import hear


def chosen(rank: int, world_size: int) -> list[Any]:
    graph, partition = cut_graph()
    lines, found = hear(), []
    for more in (0, -1):
        data = data_of(graph, partitioner=partition, boundary=Auto(bytes_of_parts(1) + more, exchange=True))
        quick(world_size, STRATEGIES["grappa"](), max_epochs=1).fit(model("SAGE", 2), data)
        found.append((data.boundary, data.coverage is None))
    return [found, [line for line in lines if line.startswith('boundary="auto" is Exchange()')]]


def test_an_exchange_takes_memory_for_one_hop() -> None:
    for rank, (found, lines) in enumerate(run_ranks(chosen, PARTS)):
        assert found[0] == (Exchange(), True) and not isinstance(found[1][0], Exchange)
        assert len(lines) == (rank == 0)


def resumed(rank: int, world_size: int, folder: Path) -> Any:
    """The weights of a fit whose second half has memory for less, and what it takes; then with another sampler."""
    graph, rows = graph_of(weighted_data()), []
    for epochs, room, path in ((2, 10**6, None), (4, 1, folder / "half.ckpt")):
        module, data = model("SAGE", 2), data_of(graph, boundary=Auto(room, exchange=True))
        running = quick(world_size, max_epochs=epochs)
        running.fit(module, data, ckpt_path=path)
        running.save_checkpoint(folder / "half.ckpt")
        rows.append(data.boundary)
    try:
        other = data_of(graph, boundary=Auto(exchange=True), **NEIGHBORS)
        quick(world_size, max_epochs=6).fit(model("SAGE", 2), other, ckpt_path=folder / "half.ckpt")
    except ValueError as error:
        return weights_of(module), rows, str(error)


def test_a_resumed_fit_keeps_what_was_chosen(tmp_path: Path) -> None:
    for weights, rows, said in run_ranks(resumed, 2, tmp_path):
        check(weights, "SAGE", 4)
        assert rows == [Exchange(), Exchange()]
        assert said.startswith('boundary="auto" was Exchange() in the fit of the checkpoint, and can be Halo(2), Halo')


def chosen_again(rank: int, world_size: int) -> list[Any]:
    graph, partition = cut_graph()
    data, found = data_of(graph, partitioner=partition, boundary=Auto(exchange=True)), []
    for strategy in STRATEGIES:
        quick(world_size, STRATEGIES[strategy](), max_epochs=1).fit(model("SAGE", 2), data)
        found.append((data.boundary, data.coverage))
    return found


def test_each_fit_chooses_for_itself() -> None:
    for found in run_ranks(chosen_again, PARTS):
        assert found == [(Exchange(), None), (Halo(2), Coverage())]
