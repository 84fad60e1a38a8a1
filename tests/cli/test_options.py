"""What is wrong on a command line is said before anything else is."""

from __future__ import annotations

import pytest

from lightning_gnn_dist.cli.main import main


@pytest.mark.parametrize(
    ("words", "command", "said"),
    [
        (["inspect", "graph", "--parts", "x"], " inspect", "argument --parts: invalid positive value: 'x'"),
        (["prepare"], " prepare", "the following arguments are required: source, out"),
        (["nope"], "", "argument command: invalid choice: 'nope'"),
    ],
)
def test_an_error_stands_without_the_usage(
    words: list[str], command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error, way_out = capsys.readouterr().err.splitlines()
    assert error.startswith(f"lightning-gnn-dist{command}: error: {said}")
    assert way_out == f"All options: lightning-gnn-dist{command} --help"
