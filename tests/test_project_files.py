"""The files around the code: workflows name pinned actions and targets that exist, and versions agree."""

import re
import tomllib
from runpy import run_path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.pages import ROOT, links

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [ROOT / ".github" / "dependabot.yml", *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def jobs_of(path: Any) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return jobs


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_step_is_a_pinned_action_or_a_target_of_the_makefile(path: Any) -> None:
    for job in jobs_of(path).values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
                assert re.search(rf"{step['uses']}  # v\d+\.\d+\.\d+$", path.read_text(), re.MULTILINE)
            else:
                assert step["run"].removeprefix("make ") in TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_but_for_the_token_of_a_release(path: Any) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in jobs_of(path).items() if "permissions" in job}
    assert more == ({"publish": {"contents": "read", "id-token": "write"}} if path.stem == "release" else {})


def test_the_checks_are_those_that_must_hold_before_a_change() -> None:
    (line,) = re.findall(r"^for targets in (.*); do$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    (checks,) = [path for path in WORKFLOWS if path.stem == "checks"]
    run = [step["run"] for job in jobs_of(checks).values() for step in job["steps"] if "run" in step]
    run.append("make test-pretend")  # needs sources that only some machines have, and is skipped elsewhere
    assert {f"make {word}" for word in line.replace('"', "").split() if not word.startswith("-")} <= set(run)


def test_pythons_that_are_tried_are_those_that_are_named() -> None:
    (checks,) = [path for path in WORKFLOWS if path.stem == "checks"]
    named = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert jobs_of(checks)["test"]["strategy"]["matrix"]["python"] == named


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_read(path: Any) -> None:
    form = yaml.safe_load(path.read_text())
    assert form and all(part["type"] == "textarea" and part["id"] for part in form.get("body", []))


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert all(citation[name] for name in ("cff-version", "message", "title", "authors"))


def test_an_index_shows_no_link_that_leads_nowhere() -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    shown = run_path(str(ROOT / "hatch_build.py"))["long_description"]
    readme = (ROOT / "README.md").read_text()
    alone = shown(readme, None, "1.2.3")
    assert not re.search(r"\]\((?!https?:|#)", alone) and "!" not in alone.split("```")[0]
    assert "*Test accuracy over bytes sent, with eight ranks." in alone and "- Quick start: from your files" in alone
    linked = shown(readme, "https://host/us/it", "1.2.3")
    assert "](https://host/us/it/raw/v1.2.3/docs/assets/accuracy-over-bytes.svg)" in linked
    files = {path for path, _ in links(ROOT / "README.md") if path and not path.endswith(".svg")}
    assert files == set(re.findall(r"\]\(https://host/us/it/blob/v1.2.3/([^)#]*)", linked))


def test_an_index_shows_code_as_it_stands() -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    shown = run_path(str(ROOT / "hatch_build.py"))["long_description"]
    fences = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    readme = (ROOT / "README.md").read_text()
    assert fences.findall(shown(readme, None, "1")) == fences.findall(readme) != []


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    allowed = {}
    for line in PROJECT["dependencies"]:
        name, version = re.match(r"([\w-]+)[^;]*>=([\d.]+)", line).groups()  # type: ignore[union-attr]
        allowed[name] = version
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pinned.keys() == allowed.keys()
    assert all((pinned[name] + ".").startswith(version + ".") for name, version in allowed.items())
