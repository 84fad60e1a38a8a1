"""From the tables of a shop to predictions: which customers will order again?

python examples/relational.py

The folder that write_shop writes says what its keys and times are, and has a task: customer, time, and whether an order
followed within 60 days. Each table is a type of nodes, each foreign key a type of edges, and each question of the task
a seed that sees what was there before its time.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import lightning.pytorch as pl
import torch
from shop import write_shop
from torch import nn
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import GrappaStrategy, Launch, PartitionedDataModule, prepare_graph
from lightning_gnn_dist.extensions.databases.column_encoder import ColumnEncoder, read_tables
from lightning_gnn_dist.extensions.databases.task_head import head_of
from lightning_gnn_dist.graph.typed.tables import Tables


class RelationalSAGE(pl.LightningModule):
    """Encoders of columns, a SAGE layer for each edge type and hop, and a head: for any database and task.

    Args:
        graph: The path of a graph that was prepared from a database, or what became of its tables.
        task: One of its tasks.
        channels: Numbers in a row.
        num_hops: As many as the sampler draws; the first from rows to questions about them.
        lr: The step size of Adam.
    """

    def __init__(self, graph: str | Tables, task: str, channels: int = 32, num_hops: int = 3, lr: float = 0.01) -> None:
        super().__init__()
        tables = read_tables(graph) if isinstance(graph, str) else graph
        self.lr, self.task = lr, task
        self.encoder = ColumnEncoder(tables, task, channels)
        self.hops, reached = nn.ModuleList(), {task, tables.task(task).receiver}
        for _ in range(num_hops):  # the last first: from rows to questions about them
            kinds = [kind for kind in tables.edge_types if kind[2] in reached]
            self.hops.insert(0, nn.ModuleDict({self.name(kind): SAGEConv(channels, channels) for kind in kinds}))
            reached |= {kind[0] for kind in kinds}
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(num_hops))
        self.head = head_of(tables, task, channels)
        self.metrics = nn.ModuleDict({name: self.head.metrics(f"{name}_") for name in ("val", "test")})

    def name(self, kind):
        return "__".join(kind).replace(".", "_dot_")  # modules have no dots in their names

    def forward(self, batch):
        x = {kind: rows.relu() for kind, rows in self.encoder(batch).items()}
        for convs, norm, blocks in zip(self.hops, self.norms, batch.blocks, strict=True):  # the outermost hop first
            made = {}
            for kind, block in blocks.items():
                if block.num_dst and self.name(kind) in convs:
                    ends = x[kind[0]], x[kind[2]][: block.num_dst]
                    made.setdefault(kind[2], []).append(convs[self.name(kind)](ends, block.adj))
            x = x | {kind: norm(sum(rows)).relu() for kind, rows in made.items()}
        return self.head(x, batch)

    def training_step(self, batch):
        return self.head.loss(self(batch), batch)

    def _judge(self, batch, phase):
        self.head.judge(self.metrics[phase], self(batch), batch)
        self.log_dict(self.metrics[phase], prog_bar=True, batch_size=batch.batch_size)

    def validation_step(self, batch):
        self._judge(batch, "val")

    def test_step(self, batch):
        self._judge(batch, "test")

    def predict_step(self, batch):
        return self.head.answer(self(batch), batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        shop, graph = Path(folder, "shop"), str(Path(folder, "shop_graph"))
        write_shop(shop)
        prepare_graph(shop, graph)  # as does: lightning-gnn-dist prepare shop shop_graph
        data = PartitionedDataModule(graph, task="stays", batch_size=256)
        # Forked ranks go on from here; otherwise each would run this script, and write the tables, again.
        strategy = GrappaStrategy(launch=Launch(start_method="fork"))
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=10, logger=False)
        model = RelationalSAGE(graph, "stays")
        trainer.fit(model, data)
        trainer.test(model, data)
