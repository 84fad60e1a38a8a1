"""The site of the documentation: it is built without a warning, and says what the code and the measurements say."""

import ast
import html
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lightning_gnn_dist
from lightning_gnn_dist import communities
from lightning_gnn_dist.gone import GONE
from tests.extensions import MISSING
from tests.pages import PAGES, ROOT, TUTORIALS, blocks, links, run_commands, write_files


def built(folder: Path) -> Path:
    """The site as ``make docs`` builds it, from any directory."""
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: pip install lightning-gnn-dist[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, "--site-dir", str(folder)], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def the_site_has_every_page_and_every_public_name(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in PAGES[1:]} | {Path("index.html")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    assert {f"{path.stem}{kind}" for path in TUTORIALS for kind in (".html", ".ipynb")} <= set(os.listdir(site))
    assert (site / "parts-in-pictures.html").read_text().count('src="data:image/png;base64,') == 3
    assert 'src="assets/accuracy-over-bytes.svg"' in (site / "index.html").read_text()
    assert (site / "assets" / "accuracy-over-bytes.svg").is_file()
    api = (site / "api.html").read_text()
    assert all(f'id="lightning_gnn_dist.{name}"' in api for name in vars(lightning_gnn_dist)["__all__"])
    assert 'href="#lightning_gnn_dist.engine.sample.Sample"' in api  # of what is imported from its module, too


def docstrings_are_readable_and_wide_formulas_scroll(site: Path) -> None:
    api = (site / "api.html").read_text()
    assert not re.findall(r":(?:class|meth|func|mod|attr|math):|\.\. math", api)
    assert re.search(r"^\.wide {\s+overflow-x: auto;", (site / "assets" / "site.css").read_text(), re.MULTILINE)
    pages = "".join(path.read_text() for path in site.glob("*.html")).replace("'", '"')
    wide = re.findall(r'(<div class="wide">)?<math[^>]*display="block"', pages)
    assert wide and all(wide)


def measurements_are_pages_of_their_own(site: Path) -> None:
    choosing = (site / "choosing.html").read_text()
    for path in sorted((ROOT / "benchmarks").glob("*.md")):
        page = (site / "benchmarks" / f"{path.stem}.html").read_text()
        assert html.escape(path.read_text().splitlines()[0].lstrip("# "), quote=False) in page
        assert f'href="benchmarks/{path.stem}.html"' in choosing.partition('id="all-measurements"')[2]


def files_that_pages_name_are_there(site: Path) -> None:
    assert (site / "examples" / "relational.py").read_text() == (ROOT / "examples" / "relational.py").read_text()
    assert not list(site.glob("hooks.py")) and not (site / "docs").exists()


def old_names_are_those_that_the_package_answers(site: Path) -> None:
    page = html.unescape((site / "old-names.html").read_text())
    rows = re.findall(r"<td><code>(.*?)</code></td>\s*<td>(.*?)</td>", page)
    assert dict(rows) == GONE


def copied_commands_have_no_prompts(site: Path) -> None:
    pages = "".join(path.read_text() for path in site.rglob("*.html"))
    copied = [
        html.unescape(text) for text in re.findall(r'<div class="language-console highlight" data-copy="(.*?)">', pages)
    ]
    assert len(copied) == pages.count("language-console") > 10
    assert all(text and not re.search(r"^\w*\$ ", text, re.MULTILINE) for text in copied)
    assert "lightning-gnn-dist fit --config my.yaml" in "\n".join(copied).splitlines()
    assert any(re.match(r"torchrun --nnodes 2 .*\\\n +-m lightning_gnn_dist", text) for text in copied)


def pages_from_a_disk_are_searched_and_need_no_network(site: Path) -> None:
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = ")
    assert '<script src="assets/iframe-worker.js">' in (site / "index.html").read_text()
    assert (site / "assets" / "iframe-worker.js").is_file()
    for path in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//', path.read_text()), path.name
        assert not re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(?:https?:)?//', path.read_text())


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    site = built(tmp_path)
    for check in (
        the_site_has_every_page_and_every_public_name,
        docstrings_are_readable_and_wide_formulas_scroll,
        measurements_are_pages_of_their_own,
        files_that_pages_name_are_there,
        old_names_are_those_that_the_package_answers,
        copied_commands_have_no_prompts,
        pages_from_a_disk_are_searched_and_need_no_network,
    ):
        check(site)


def test_every_script_that_measures_is_listed() -> None:
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - {"harness.py"}
    listed = re.findall(r"^\| `([^`]*)` \|", (ROOT / "benchmarks" / "scripts.md").read_text(), re.M)
    assert set(listed) == scripts | {"peers/run.py"}


def test_the_wire_is_worked_out_right() -> None:
    wire = (ROOT / "docs" / "wire.md").read_text()
    models = re.findall(r"^\| GraphSAGE ([\d -]+) \| (\S+) \| (\S+) \| (\S+) ms \| (\S+) ms \|$", wire, re.M)
    for widths, parameters, megabytes, slow, fast in models:
        layers = itertools.pairwise(map(int, widths.split(" - ")))
        count = sum(2 * width_in * width_out + width_out for width_in, width_out in layers)
        least = 1.5 * 4e-6 * count * 8
        assert int(parameters.replace(",", "")) == count and float(megabytes) == pytest.approx(4e-6 * count, rel=0.01)
        assert (float(slow), float(fast)) == pytest.approx((least, least / 10), rel=0.01)
    assert len(models) == 3


@pytest.mark.skipif(bool(MISSING), reason="some are said by extensions")
def test_messages_are_those_of_the_code() -> None:
    said = "\n".join(map(_strings, (ROOT / "lightning_gnn_dist").rglob("*.py")))
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    pieces = [piece.strip() for row in rows for piece in row.split("…") if len(piece.strip()) > 3]
    assert len(rows) > 20
    assert [piece for piece in pieces if piece not in said] == []


def _strings(path: Path) -> str:
    """All texts of a module, a line each; of those with values in them the pieces."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_a_page_begins_with_what_you_can_do_after_it() -> None:
    for page in PAGES[1:]:
        assert page.stem == "api" or re.match(r"# .+\n\nAfter this page you (can|know) ", page.read_text()), page


# The commands of the guides, as they stand, on a small graph.


# In the order in which one reads on: a graph is prepared, looked at, and asked for predictions.
WITH_COMMANDS = ("too-large", "choose", "plan", "gpu-training", "new-nodes")
ELSEWHERE = ("serve", "scp", "curl", "pytest")  # in serving/test_app.py, or the reader's own


def commands() -> list[str]:
    text = "".join(block.code for guide in WITH_COMMANDS for block in blocks("console", guide)).replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    return [line for line in lines if not {*line.split()[:2]} & {*ELSEWHERE}]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason="some are of extensions")
def test_the_commands_of_the_guides_run(tmp_path: Path) -> None:
    graph = communities(2000, 8, num_features=64).to_pyg()
    (tmp_path / "big").mkdir()
    for name in ("edge_index", "x", "y", "train_mask", "val_mask", "test_mask"):
        np.save(tmp_path / "big" / f"{name}.npy", graph[name].numpy())
    write_files(tmp_path)
    lines = commands()
    asks = next(at for at, line in enumerate(lines) if " predict " in line)
    lines.insert(asks, "lightning-gnn-dist fit --config my.yaml")  # as the quick start has done
    run_commands(lines, tmp_path)
    assert len(lines) > 7 and np.load(tmp_path / "some.npy").shape == (3, 8)
    assert np.load(tmp_path / "all.npy").shape == (2000, 8) and (tmp_path / "my_shares" / "share-00001").is_dir()


# Thirty questions of three readers, and the page and heading that answers each in what is read first.


GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
START = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("install", "quick-start", "migration"))]
MOST_WORDS, MOST_OF_A_GUIDE = 8_500, 550

QUESTIONS = [  # of a user of PyG
    (
        "What takes the place of NeighborLoader?",
        "migration",
        "NeighborLoader or LightningNodeData",
        "PartitionedDataModule",
    ),
    ("Over which rows is the loss?", "quick-start", "A module", "batch.batch_size"),
    ("Which strategy do I begin with?", "guides/choose", "Begin with Grappa", "trains as well as one process"),
    ("What does max_epochs count?", "guides/meaning", "Epochs", "a round: local steps, then a meeting"),
    ("How large is a step's batch on four ranks?", "guides/meaning", "Batches", "4,096 nodes in a step"),
    ("Are metrics those of one process?", "guides/meaning", "Metrics", "the figure is that of one process"),
    ("Do two runs give the same weights?", "guides/meaning", "The same run again", "equal to the bit"),
    ("Does training see features of test nodes?", "guides/meaning", "What training sees", "transductive"),
    ("What do I do about rare classes?", "guides/meaning", "Classes of unequal size", "weigh the loss"),
    ("Why is it less accurate than one process?", "accuracy", "Edges are lost", "data/coverage"),
    # of a user of types
    ("Does my HeteroConv model run?", "guides/node-types", "Train", "runs unchanged"),
    ("How do I draw more of one edge type?", "guides/node-types", "Neighbours of each type", "name all"),
    ("What of a type without features?", "guides/node-types", "A type without features", "torch.nn.Embedding"),
    ("Is an event of the question's own time seen?", "guides/events", "Equal times", "is not seen"),
    ("Can one node be asked about twice?", "guides/events", "Several questions of one node", "a type of nodes"),
    ("How do I predict links of one edge type?", "guides/link-tasks", "Train", "edge_type="),
    ("What do I recommend to a user?", "guides/link-tasks", "The best new links", "torch.topk("),
    ("How do I begin with tables and keys?", "guides/from-tables", "Your own tables", "fkeys"),
    ("How do I ask about a new node?", "guides/new-nodes", "A server", '"new:0"'),
    ("How do I get predictions with my own ids?", "guides/new-nodes", "Rows in a file", "ids of your own"),
    # of an engineer
    ("How are 200 GB of files prepared?", "guides/too-large", "Prepare it", "--memory 4"),
    ("What if features do not fit into memory?", "guides/too-large", "Features stay in their files", "cache_bytes"),
    ("What if no host can hold the graph?", "guides/too-large", "Each rank has a shard", "divide"),
    ("How many hosts do I need?", "guides/plan", "Before the graph is there", "the bytes of all parts, divided by"),
    ("Where did the time go?", "guides/plan", "While it trains", "`meetings`"),
    ("How do I start on two hosts?", "guides/several-hosts", "Start it", "--node-rank 1"),
    ("What if a rank does not start?", "guides/several-hosts", "If a rank does not come", "who is missing"),
    ("What if a host is taken away?", "guides/several-hosts", "If a host may be taken away", "peers=Elastic()"),
    ("How do I train on four GPUs?", "guides/gpu-training", "Start it", 'accelerator="gpu", devices=4'),
    ("What do I do when GPUs wait for batches?", "guides/gpu-training", "Let the GPU draw", 'sample_on="auto"'),
]


def section(page: Path, heading: str) -> str:
    """What stands below a heading, up to the next of its level."""
    text = page.read_text()
    begin = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert begin, f"{page.name} has no heading {heading!r}"
    return re.split(rf"^#{{1,{len(begin[1])}}} ", text[begin.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def test_a_question_is_answered_where_a_newcomer_looks() -> None:
    for question, page, heading, answer in QUESTIONS:
        assert answer in re.sub(r"\s+", " ", section(ROOT / "docs" / f"{page}.md", heading)), question


def test_what_is_read_first_is_short() -> None:
    words = {page: len(page.read_text().split()) for page in [*START, *GUIDES]}
    assert sum(words.values()) < MOST_WORDS
    assert {page.name: words[page] for page in GUIDES if words[page] > MOST_OF_A_GUIDE} == {}


def test_the_first_page_leads_to_all_guides_and_the_reference_to_all_other_pages() -> None:
    named = {name for name, _ in links(ROOT / "README.md")}
    assert {path.relative_to(ROOT).as_posix() for path in GUIDES} <= named
    listed = {name for name, _ in links(ROOT / "docs" / "reference.md")} | {Path(name).name for name in named}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= listed
