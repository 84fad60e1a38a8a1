"""A configuration that cannot be meant is refused in one line: no traceback, no hang, no gigabytes."""

import sys
from pathlib import Path

import pytest

from lightning_gnn_dist.cli.config_file import check_files
from lightning_gnn_dist.cli.main import main

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


def bomb(opening: str, item: str, close: str) -> str:
    """Lines of which each stands for ten times the one before."""
    lines = [f"a: &a {opening}{item.format(0, 'x')}{close}"]
    for name, before in zip("bcdefghijklm", "abcdefghijkl", strict=True):
        items = ", ".join(item.format(place, f"*{before}") for place in range(10))
        lines.append(f"{name}: &{name} {opening}{items}{close}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("trainer: {max_epochs: 1}  # caf\xe9".encode("latin-1"), r"not in UTF-8 \(at byte 31\)"),
        ("trainer: {}".encode("utf-16"), "not in UTF-8"),
        (b"trainer: \0", "no YAML"),
        (b"", "empty"),
        (b"# nothing\n", "empty"),
        (b"- 1\n- 2\n", "must hold names with settings"),
        (b"hello", "must hold names with settings"),
        (b"1: 2\n", "line 1, has the key 1"),
        (b"trainer: null\n", "line 1, has null for trainer: give settings"),
        (b"trainer:\n", "line 1, has nothing for trainer: give settings"),
        (b"data: 5\n", "line 1, has 5 for data: give settings, or name a class"),
        (b"model: [1]\n", "line 1, has a list for model: name its class"),
        (b"trainer:\n\tmax_epochs: 1\n", "line 2, is no YAML: .*cannot start any token"),
        (b"trainer: {max_epochs: 1\n", "line 2, is no YAML"),
        (b"data: {}\n---\ndata: {}\n", "single document"),
        (b"trainer: {}\ndata: {}\ntrainer: {}\n", "line 3, names 'trainer' for the second time"),
        (b"data: {seed: 1, seed: 2}\n", "line 1, names 'seed' for the second time"),
        (b"data: {? [1] : 2}\n", "a key that is no name"),
        (b"trainer: !!python/object/apply:os.system [ls]\n", "has the tag"),
        (b"data: {batch_size: !!binary aGk=}\n", "has the tag"),
        (b"data: {batch_size: " + b"9" * 5000 + b"}\n", "a number of 5000 digits"),
        (b"trainer: &a {callbacks: *a}\n", "holds itself"),
        (b"data: " + b"[" * 3000 + b"]" * 3000, "nested more than"),
        (b"x" * (1 << 21), "bytes, and a configuration at most"),
        (bomb("[", "{1}", "]").encode(), "stands for more than 20,000 values"),
        (bomb("{", "k{}: {}", "}").encode(), "stands for more than 20,000 values"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", "fit", f"--config={file}"])
    with pytest.raises(SystemExit, match=reason) as refusal:
        main()
    assert str(refusal.value).startswith(f"lightning-gnn-dist fit: {file}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_pass(path: Path) -> None:
    check_files([f"--config={path}"])
    check_files(["--config", str(path), "--trainer.max_epochs=2"])


def test_a_few_aliases_are_fine(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: &d {batch_size: 2}\nmodel: {<<: *d, size: 3}\ntrainer: {x: [1, 2]}\n")
    check_files([f"--config={tmp_path}/config.yaml"])


def test_files_for_other_options_are_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not in UTF-8"):
        check_files(["--model", f"{tmp_path}/model.yaml"])


@pytest.mark.parametrize("path", ["nowhere.yaml", "", "."])
def test_a_configuration_must_be_a_file(path: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match="--config must be a"):
        check_files([f"--config={path}"])


@pytest.mark.parametrize("number", ["inf", "nan", "-1", "0", "1e300", "x"])
def test_an_amount_of_memory_is_a_number(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "source", "out", f"--out-of-core={number}"])
    assert "argument --memory/--out-of-core: " in capsys.readouterr().err.splitlines()[0]


def test_a_demo_of_too_few_nodes_is_refused_in_one_line() -> None:
    with pytest.raises(SystemExit, match=r"lightning-gnn-dist demo: num_nodes \(3\) must be at least twice"):
        main(["demo", "--nodes=3"])
