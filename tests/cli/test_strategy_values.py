"""Settings of strategies that are values, from the command line."""

from __future__ import annotations

import pytest

from tests.cli.refusing import refused


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("drift.towards=x", "trainer.strategy.drift.towards must be one of ['ranks', 'global'] or null, got x."),
        (
            "drift=ranks",
            "strategy.drift must be settings of towards, decay, anchor_steps or null, got ranks.",
        ),
        ("launch.timeout=x", "trainer.strategy.launch.timeout: Not of type timedelta: Expected a string with form "),
        ("launch.start_method=x", "trainer.strategy.launch.start_method must be one of ['popen', 'spawn', 'fork', "),
        ("launch.backend=x", "None for what fits the device, got 'x'."),
    ],
)
def test_what_a_value_refuses_is_said_in_one_line(
    option: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--config=configs/llcg.yaml", f"--trainer.strategy.{option}"]
    last = refused(given, capsys, monkeypatch).splitlines()[-1]
    assert last.startswith(f"error: trainer.strategy.{option.partition('=')[0]}") and reason in last
