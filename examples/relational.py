"""From the tables of a shop to predictions: which customers will order again?

python examples/relational.py

Each table is a type of nodes, each foreign key a type of edges. What is asked is a table as well: customer, day, and
whether an order followed within 60 days. A customer may be asked about on several days: each time the model sees what
had happened before.
"""

import csv
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import BinaryAUROC

from lightning_gnn_dist import (
    Graph,
    GrappaStrategy,
    Launch,
    PartitionedDataModule,
    PredictionWriter,
    TemporalSampler,
    split_by_time,
)

WITHIN = 60  # days
DRAWN = {  # neighbours of each type, hop by hop; those with 0 are never looked at
    ("customer", "rev_about", "question"): [1, 0, 0],
    ("order", "by", "customer"): [0, 5, 0],
    ("product", "rev_of", "order"): [0, 0, 1],
    ("question", "about", "customer"): [0, 0, 0],
    ("customer", "rev_by", "order"): [0, 0, 0],
    ("order", "of", "product"): [0, 0, 0],
}


def write_tables(folder, num_customers=3_000, num_products=300, days=700, seed=0):
    """Customers order until a product disappoints them, as three in ten mostly do. Ratings tell which, more or less."""
    draw = np.random.default_rng(seed)
    is_good = draw.random(num_products) < 0.7
    rating = 3 + is_good + draw.normal(0, 0.5, num_products)
    orders, questions = [], []  # (customer, product, day, price), (customer, day, label)
    for customer, first in enumerate(draw.integers(days, size=num_customers)):
        day, stays = first, True
        while stays and day < days:
            product = draw.integers(num_products)
            orders.append((customer, product, day, round(draw.uniform(5, 50), 2)))
            stays = draw.random() < (0.95 if is_good[product] else 0.2)
            gap = draw.integers(1, WITHIN)
            asked = day + draw.integers(1, gap + 1)
            if asked + WITHIN < days:  # later it is not known yet
                questions.append((customer, asked, int(stays)))
            day += gap
    tables = {
        "nodes/customer": (["id", "age"], enumerate(draw.integers(18, 80, num_customers))),
        "nodes/product": (["id", "rating"], enumerate(rating)),
        "nodes/order": (
            ["id", "day", "price"],
            ((number, day, price) for number, (*_, day, price) in enumerate(orders)),
        ),
        "nodes/question": (["id", "day", "label"], ((number, *rest) for number, (_, *rest) in enumerate(questions))),
        "edges/order__by__customer": (["source", "target"], ((number, row[0]) for number, row in enumerate(orders))),
        "edges/order__of__product": (["source", "target"], ((number, row[1]) for number, row in enumerate(orders))),
        "edges/question__about__customer": (["source", "target"], ((k, row[0]) for k, row in enumerate(questions))),
    }
    for name, (heading, rows) in tables.items():
        path = folder / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([heading, *rows])


class Shop(pl.LightningModule):
    """A linear layer for each table, a SAGE layer for each foreign key on the way from products to questions."""

    def __init__(self, hidden=32):
        super().__init__()
        self.tables = nn.ModuleDict({"customer": nn.Linear(1, hidden), "product": nn.Linear(1, hidden)})
        self.tables["order"] = nn.Linear(2, hidden)
        self.convs = nn.ModuleDict({kind[1]: SAGEConv(hidden, hidden) for kind in list(DRAWN)[:3]})
        self.head = nn.Linear(hidden, 1)
        self.auroc = BinaryAUROC()

    def forward(self, batch):
        orders = batch["order"]
        age = batch["question"].seed_time[orders.batch] - orders.day  # of each order, on the day of the question
        features = {
            "customer": batch["customer"].x / 50,
            "product": batch["product"].x,
            "order": torch.cat([orders.x / 50, age[:, None] / WITHIN], 1),
        }
        x = {name: table(features[name]).relu() for name, table in self.tables.items()}
        x["question"] = x["customer"].new_zeros(batch["question"].num_nodes, self.head.in_features)
        for blocks in batch.blocks:  # the first from products to orders, the last from customers to questions
            made = {}
            for source, name, target in list(DRAWN)[:3]:
                block = blocks[source, name, target]
                if block.num_dst:
                    ends = x[source], x[target][: block.num_dst]
                    made[target] = self.convs[name](ends, block.adj).relu()
            x = x | made
        return self.head(x["question"][: batch.batch_size]).squeeze(1)

    def training_step(self, batch):
        return functional.binary_cross_entropy_with_logits(self(batch), batch["question"].y.float())

    def validation_step(self, batch):
        self.auroc.update(self(batch), batch["question"].y)
        self.log("auroc", self.auroc, prog_bar=True, batch_size=batch.batch_size)

    test_step = validation_step

    def predict_step(self, batch):
        return self(batch).sigmoid()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        tables, saved = Path(folder, "tables"), Path(folder, "graph")
        write_tables(tables)
        command = [sys.executable, "-m", "lightning_gnn_dist", "prepare", tables, saved, "--time", "day", "--reverse"]
        subprocess.run(command, check=True)
        graph = split_by_time(Graph.open(saved).with_seeds("question"), "day")  # the last questions are to test
        sampler = TemporalSampler(DRAWN, time="day", pick="latest")
        data = PartitionedDataModule(graph, sampler=sampler, batch_size=256)
        # Forked ranks go on from here; otherwise each would run this script, and write the tables, again.
        strategy = GrappaStrategy(launch=Launch(start_method="fork"))
        writer = PredictionWriter(Path(folder, "again.npy"))
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=10, logger=False, callbacks=writer
        )
        model = Shop()
        trainer.fit(model, data)
        trainer.test(model, data)
        trainer.predict(model, data, return_predictions=False)
        again = np.load(Path(folder, "again.npy"))  # a row for each question, in the order of their table
        print("least likely to order again: questions", again.reshape(-1).argsort()[:5].tolist())
