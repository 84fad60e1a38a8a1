"""The made-up shop: the same for the same seed, with an answer that a category, a text and a missing value tell."""

import csv
from pathlib import Path

import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.databases.shop import BAD_MAKERS, PRAISE, write_shop


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_it_is_the_same_for_the_same_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["shop", str(tmp_path / "a"), "--customers", "100"])
    assert "prepare" in capsys.readouterr().out
    write_shop(tmp_path / "b", 100)
    write_shop(tmp_path / "c", 100, seed=1)
    names = [path.relative_to(tmp_path / "a") for path in sorted((tmp_path / "a").rglob("*")) if path.is_file()]
    assert len(names) == 9 and all(
        (tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names
    )
    assert (tmp_path / "a" / "order.csv").read_bytes() != (tmp_path / "c" / "order.csv").read_bytes()
    with pytest.raises(SystemExit, match=r"shop: .*a"):
        main(["shop", str(tmp_path / "a")])


def test_three_columns_tell_the_answer(tmp_path: Path) -> None:
    """Each alone, of what was there before the question, and all of them more."""
    write_shop(tmp_path / "shop", 600)
    orders, reviews = rows_of(tmp_path / "shop" / "order.csv"), rows_of(tmp_path / "shop" / "review.csv")
    bad = {row["id"]: row["maker"] in BAD_MAKERS for row in rows_of(tmp_path / "shop" / "product.csv")}
    told = {row["id"]: row["born"] != "" for row in rows_of(tmp_path / "shop" / "customer.csv")}
    liked = {row["order_id"]: (row["at"], any(word in row["words"] for word in PRAISE)) for row in reviews}
    of_customers: dict[str, list[dict[str, str]]] = {}
    for row in orders:
        of_customers.setdefault(row["customer_id"], []).append(row)
    signs, y = [], []
    for question in rows_of(tmp_path / "shop" / "tasks" / "stays" / "labels.csv"):
        before = (row for row in of_customers[question["customer_id"]] if row["at"] < question["at"])
        last = max(before, key=lambda row: row["at"])
        assert liked[last["id"]][0] < question["at"]
        signs.append((not bad[last["product_id"]], liked[last["id"]][1], told[question["customer_id"]]))
        y.append(int(question["stays"]))
    found, answers = torch.tensor(signs).float(), torch.tensor(y)
    every = float(binary_auroc((0.1 + found.sum(1)) / 4, answers))
    alone = [float(binary_auroc(0.25 + found[:, at] / 2, answers)) for at in range(3)]
    assert every > 0.82 and min(alone) > 0.62 and max(alone) < every - 0.08


def test_a_word_that_comes_later_is_unseen(tmp_path: Path) -> None:
    write_shop(tmp_path / "shop", 200)
    prepare_graph(tmp_path / "shop", tmp_path / "graph")
    channel = [row["channel"] for row in rows_of(tmp_path / "shop" / "order.csv")]
    codes = Graph.open(tmp_path / "graph").types.node_arrays["order"]["categories"][:, 0].tolist()
    assert dict(zip(channel, codes, strict=True)) == {"app": 1, "store": 2, "web": 3}
