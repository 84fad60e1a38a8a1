"""Models of PyG's are evaluated by ranks as one process evaluates them on the whole graph."""

from pathlib import Path
from typing import Any

import pytest
from torch_geometric.nn import GraphSAGE

from tests.layers.models import MODELS, Ready, graph_of, uneven_data
from tests.layers.test_ranks import OWN, SLOW, check, check_fits, check_models, evaluate, fits
from tests.ranks import run_ranks

OF_PYG = [name for name in MODELS if name not in OWN]


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_are_those_of_the_whole_graph(world_size: int) -> None:
    check_models(world_size, [(name, 3) for name in OF_PYG if world_size == 1 or name not in SLOW])


def test_rows_of_a_graph_in_files(tmp_path: Path) -> None:
    graph_of(uneven_data()).save(tmp_path / "graph")
    cases = [("PyG GCN", 2)]
    check(cases, run_ranks(evaluate, 1, str(tmp_path / "graph"), "files", cases))


def two_layers() -> Any:
    return Ready(GraphSAGE, 2).double()


def test_fits_validate_the_weights_of_their_time() -> None:
    check_fits(run_ranks(fits, 2, two_layers))
