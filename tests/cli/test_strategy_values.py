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
            "strategy.drift must be settings of towards, decay, anchor_steps, corrects or null, got ranks.",
        ),
        ("launch.timeout=x", "trainer.strategy.launch.timeout: Not of type timedelta: Expected a string with form "),
        ("launch.start_method=x", "trainer.strategy.launch.start_method must be one of ['popen', 'spawn', 'fork', "),
        ("drift.decay=1.5", "drift.decay must be a finite number between 0 and 1, got 1.5: with 1 the shift does not"),
        ("drift.anchor_steps=0", "trainer.strategy.drift.anchor_steps must be an integer of at least 1, got 0."),
        ("launch.backend=x", "None for what fits the device, got 'x'."),
        ("launch.start_timeout=0:00:00", "start_timeout must be longer than nothing, got 0:00:00, "),
    ],
)
def test_what_a_value_refuses_is_said_in_one_line(
    option: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--config=configs/llcg.yaml", f"--trainer.strategy.{option}"]
    last = refused(given, capsys, monkeypatch).splitlines()[-1]
    assert last.startswith(f"error: trainer.strategy.{option.partition('=')[0]}") and reason in last
