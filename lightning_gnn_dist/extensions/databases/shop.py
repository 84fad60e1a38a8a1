"""A made-up shop as a folder of tables, to try databases on: the same for the same seed."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.checks import check_at_least, check_folder, check_seed

DAYS, WITHIN = 700, 60  # the shop is open for so many days; who orders within so many days stays
VAL_DAY, TEST_DAY = 440, 540
MONTH = 30  # days: what is bought next is asked once a month
LOYAL = 0.8  # how often a customer buys from the maker that they like
FIRST = datetime(2023, 1, 1)
MAKERS = [f"maker{number}" for number in range(12)]
BAD_MAKERS = MAKERS[:4]
CHANNELS, LATE_CHANNEL = ("web", "store"), "app"  # that one opens after the last question to validate
PRAISE, BLAME = ("lovely", "sturdy", "perfect", "bright"), ("broken", "flimsy", "useless", "scratched")
FILL = ("the", "box", "came", "on", "a", "rainy", "day", "and", "my", "sister", "put", "it", "in", "our", "kitchen")
MANIFEST = """\
val_timestamp: {val}
test_timestamp: {test}
tables:
  customer: {{pkey: id, time_col: joined}}
  product: {{pkey: id, columns: {{name: text}}}}
  order: {{pkey: id, time_col: at, fkeys: {{customer_id: customer, product_id: product}}}}
  review: {{time_col: at, fkeys: {{order_id: order}}, columns: {{words: text}}}}
"""
STAYS = """\
description: Does the customer order within {within} days?
task_type: binary_classification
entity_table: customer
entity_col: customer_id
time_col: at
target_col: stays
"""
BUYS = """\
description: Which products does the customer order within {month} days?
task_type: recommendation
src_entity_table: customer
src_entity_col: customer_id
dst_entity_table: product
dst_entity_col: product_ids
time_col: at
eval_k: 10
"""


def write_shop(path: str | Path, num_customers: int = 3_000, num_products: int = 300, seed: int = 0) -> None:
    """Write the tables of a shop, and two tasks: which customers will order again, and which products?

    Whether they do depends, in equal parts, on the maker of what they ordered last (a category), on what they wrote
    about it (a text), and on whether they told their year of birth (a missing value); the rest is chance. What they
    order is mostly of a maker that they like, as their orders before it tell.

    Args:
        path: The folder to write, which must not exist: tables in CSV with a ``database.yaml``, and the tasks ``stays``
            and ``buys``.
        num_customers: Number of customers.
        num_products: Number of products.
        seed: Decides everything random.
    """
    folder = check_folder("path", path)
    check_at_least(1, num_customers=num_customers, num_products=num_products)
    check_seed(seed)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: choose another path.")
    for task, told in (("stays", STAYS.format(within=WITHIN)), ("buys", BUYS.format(month=MONTH))):
        (folder / "tasks" / task).mkdir(parents=True)
        (folder / "tasks" / task / "manifest.yaml").write_text(told, encoding="utf-8")
    draw = np.random.default_rng(seed)
    makers = draw.choice(MAKERS, num_products)
    prices = draw.lognormal(3, 0.5, num_products).round(2)
    has_told = draw.random(num_customers) < 0.5
    joined = draw.integers(DAYS - 2 * WITHIN, size=num_customers)
    orders, reviews, questions = _history(draw, makers, has_told, joined)
    cities = draw.choice(["Lund", "Oslo", "Turku", "Riga"], num_customers).tolist()
    born = [
        str(year) if told else "" for year, told in zip(draw.integers(1940, 2005, num_customers), has_told, strict=True)
    ]
    days = [_date(day) for day in joined]
    _write(
        folder / "customer.csv",
        ("id", "joined", "city", "born"),
        zip(range(num_customers), days, cities, born, strict=True),
    )
    names = [" ".join(draw.choice(FILL, 2)) for _ in range(num_products)]
    products = zip([f"P{n}" for n in range(num_products)], names, makers, prices, strict=True)
    _write(folder / "product.csv", ("id", "name", "maker", "price"), products)
    _write(folder / "order.csv", ("id", "customer_id", "product_id", "at", "pieces", "channel"), orders)
    _write(folder / "review.csv", ("order_id", "at", "words"), reviews)
    _write(folder / "tasks" / "stays" / "labels.csv", ("customer_id", "at", "stays"), questions)
    _write(folder / "tasks" / "buys" / "labels.csv", ("customer_id", "at", "product_ids"), _bought(orders))
    told = MANIFEST.format(val=_date(VAL_DAY)[:10], test=_date(TEST_DAY)[:10])
    (folder / "database.yaml").write_text(told, encoding="utf-8")


def _history(
    draw: np.random.Generator, makers: Any, has_told: Any, joined: Any
) -> tuple[list[Sequence[Any]], list[Sequence[Any]], list[Sequence[Any]]]:
    """Orders, reviews, and questions between two orders, of all customers."""
    orders: list[Sequence[Any]] = []
    reviews: list[Sequence[Any]] = []
    questions: list[Sequence[Any]] = []
    for customer, (first, liked) in enumerate(zip(joined, draw.choice(makers, len(joined)), strict=True)):
        day, stays, of_liked = first + draw.random(), True, np.flatnonzero(makers == liked)
        while stays and day < DAYS:
            product = int(draw.choice(of_liked) if draw.random() < LOYAL else draw.integers(len(makers)))
            likes = draw.random() < 0.5
            odds = 2.0 * (makers[product] not in BAD_MAKERS) + 2.0 * likes + 2.0 * has_told[customer] - 2.2
            stays = draw.random() < 1 / (1 + np.exp(-1.3 * odds))
            gap = draw.uniform(2, WITHIN)
            asked = day + draw.uniform(1, gap)
            reviews.append((len(orders), _date(day + draw.uniform(0, asked - day)), _review(draw, likes)))
            orders.append((len(orders), customer, f"P{product}", _date(day), draw.integers(1, 4), _channel(draw, day)))
            if asked + WITHIN < DAYS:  # later it is not known yet
                questions.append((customer, _date(asked), int(stays)))
            day += gap
    return orders, reviews, questions


def _bought(orders: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, str, str]]:
    """Once a month, what those who have ordered before order next; a month that begins to be tested is not cut."""
    months = [range(VAL_DAY % MONTH, VAL_DAY, MONTH), range(VAL_DAY, TEST_DAY - MONTH, MONTH)]
    for start in (day for of in (*months, range(TEST_DAY, DAYS - MONTH, MONTH)) for day in of):
        before, end = _date(start), _date(start + MONTH)
        known, bought = set(), dict[Any, list[str]]()
        for _, customer, product, at, *_ in orders:
            if at < before:
                known.add(customer)
            elif before < at <= end:
                bought.setdefault(customer, []).append(product)
        yield from ((customer, before, " ".join(bought[customer])) for customer in bought if customer in known)


def _channel(draw: np.random.Generator, day: float) -> str:
    return str(draw.choice(CHANNELS if day < TEST_DAY else (*CHANNELS, LATE_CHANNEL)))


def _review(draw: np.random.Generator, likes: bool) -> str:
    words = [*draw.choice(FILL, 6), draw.choice(PRAISE if likes else BLAME)]
    draw.shuffle(words)
    return " ".join(words)


def _date(day: float) -> str:
    return (FIRST + timedelta(days=float(day))).isoformat(" ", "seconds")


def _write(path: Path, heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([heading, *rows])
