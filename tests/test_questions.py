"""Thirty questions of three readers, and the page and heading that answers each in what is read first."""

import re
from pathlib import Path

from tests.pages import ROOT, links

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
    ("What do I recommend to a user?", "guides/link-tasks", "The best new links", "--best_links 10"),
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
