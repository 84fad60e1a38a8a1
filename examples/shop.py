"""A made-up shop as a folder of tables with keys, to try databases on: the same for the same seed.

python examples/shop.py shop
"""

import argparse
import csv
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

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
STAYS = f"""\
description: Does the customer order within {WITHIN} days?
task_type: binary_classification
entity_table: customer
entity_col: customer_id
time_col: at
target_col: stays
"""
BUYS = f"""\
description: Which products does the customer order within {MONTH} days?
task_type: recommendation
src_entity_table: customer
src_entity_col: customer_id
dst_entity_table: product
dst_entity_col: product_ids
time_col: at
eval_k: 10
"""


def write_shop(folder, num_customers=3_000, num_products=300, seed=0):
    """Write tables in CSV with a database.yaml, and two tasks: which customers will order again, and which products?

    Whether they do depends, in equal parts, on the maker of what they ordered last (a category), on what they wrote
    about it (a text), and on whether they told their year of birth (a missing value); the rest is chance. What they
    order is mostly of a maker that they like, as their orders before it tell.
    """
    folder = Path(folder)
    folder.mkdir(parents=True)  # which must not be there yet
    draw = np.random.default_rng(seed)
    makers = draw.choice(MAKERS, num_products)
    prices = draw.lognormal(3, 0.5, num_products).round(2)
    has_told = draw.random(num_customers) < 0.5
    joined = draw.integers(DAYS - 2 * WITHIN, size=num_customers)
    orders, reviews, questions = history(draw, makers, has_told, joined)
    cities = draw.choice(["Lund", "Oslo", "Turku", "Riga"], num_customers).tolist()
    years = draw.integers(1940, 2005, num_customers)
    born = [str(year) if told else "" for year, told in zip(years, has_told, strict=True)]
    customers = zip(range(num_customers), map(date, joined), cities, born, strict=True)
    write(folder / "customer.csv", ("id", "joined", "city", "born"), customers)
    names = [" ".join(draw.choice(FILL, 2)) for _ in range(num_products)]
    products = zip([f"P{n}" for n in range(num_products)], names, makers, prices, strict=True)
    write(folder / "product.csv", ("id", "name", "maker", "price"), products)
    write(folder / "order.csv", ("id", "customer_id", "product_id", "at", "pieces", "channel"), orders)
    write(folder / "review.csv", ("order_id", "at", "words"), reviews)
    (folder / "database.yaml").write_text(MANIFEST.format(val=date(VAL_DAY)[:10], test=date(TEST_DAY)[:10]))
    for task, manifest, answer, rows in (
        ("stays", STAYS, "stays", questions),
        ("buys", BUYS, "product_ids", bought(orders)),
    ):
        (folder / "tasks" / task).mkdir(parents=True)
        (folder / "tasks" / task / "manifest.yaml").write_text(manifest)
        write(folder / "tasks" / task / "labels.csv", ("customer_id", "at", answer), rows)


def history(draw, makers, has_told, joined):
    """Orders, reviews, and questions between two orders, of all customers."""
    orders, reviews, questions = [], [], []
    for customer, (first, liked) in enumerate(zip(joined, draw.choice(makers, len(joined)), strict=True)):
        day, stays, of_liked = first + draw.random(), True, np.flatnonzero(makers == liked)
        while stays and day < DAYS:
            product = int(draw.choice(of_liked) if draw.random() < LOYAL else draw.integers(len(makers)))
            likes = draw.random() < 0.5
            odds = 2.0 * (makers[product] not in BAD_MAKERS) + 2.0 * likes + 2.0 * has_told[customer] - 2.2
            stays = draw.random() < 1 / (1 + np.exp(-1.3 * odds))
            gap = draw.uniform(2, WITHIN)
            asked = day + draw.uniform(1, gap)
            reviews.append((len(orders), date(day + draw.uniform(0, asked - day)), review(draw, likes)))
            orders.append((len(orders), customer, f"P{product}", date(day), draw.integers(1, 4), channel(draw, day)))
            if asked + WITHIN < DAYS:  # later it is not known yet
                questions.append((customer, date(asked), int(stays)))
            day += gap
    return orders, reviews, questions


def bought(orders):
    """Once a month, what those who have ordered before order next; a month that begins to be tested is not cut."""
    months = [range(VAL_DAY % MONTH, VAL_DAY, MONTH), range(VAL_DAY, TEST_DAY - MONTH, MONTH)]
    for start in (day for of in (*months, range(TEST_DAY, DAYS - MONTH, MONTH)) for day in of):
        before, end = date(start), date(start + MONTH)
        known, bought = set(), {}
        for _, customer, product, at, *_ in orders:
            if at < before:
                known.add(customer)
            elif before < at <= end:
                bought.setdefault(customer, []).append(product)
        yield from ((customer, before, " ".join(bought[customer])) for customer in bought if customer in known)


def channel(draw, day):
    return draw.choice(CHANNELS if day < TEST_DAY else (*CHANNELS, LATE_CHANNEL))


def review(draw, likes):
    words = [*draw.choice(FILL, 6), draw.choice(PRAISE if likes else BLAME)]
    draw.shuffle(words)
    return " ".join(words)


def date(day):
    return (FIRST + timedelta(days=float(day))).isoformat(" ", "seconds")


def write(path, heading, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([heading, *rows])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder to write, which must not exist")
    parser.add_argument("--customers", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} is there already: name another folder")
    write_shop(options.out, options.customers, seed=options.seed)
    print(f"Go on: lightning-gnn-dist prepare {options.out} {options.out}_graph")
