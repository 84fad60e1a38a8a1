"""A model's predictions for every node, written to one file by all ranks at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_gnn_dist.batches.batch import store_of_seeds
from lightning_gnn_dist.callbacks.shared_rows import SharedRows
from lightning_gnn_dist.checks import check_true_or_false, is_limit
from lightning_gnn_dist.graph.storage.parquet_rows import TABLES, check_ids_of, check_no_file, check_rows_file
from lightning_gnn_dist.graph.storage.row_file import rows_of
from lightning_gnn_dist.graph.user_ids import NodeColumns


class PredictionWriter(Callback):
    """Writes the rows that ``predict_step`` returns to one ``.npy``, row ``v`` for node ``v`` of the graph.

    Of ``data.only(nodes)`` it is row ``i`` for node ``nodes[i]``. With the suffix ``.parquet`` it is a table with the
    columns ``node`` and ``row``, where nodes have the ids of the tables that their graph was prepared from.

        trainer = pl.Trainer(..., callbacks=[PredictionWriter("logits.npy")])
        trainer.predict(model, data, return_predictions=False)  # otherwise Lightning keeps all in RAM

    ``predict_step`` (by default the module's ``forward``) returns a tensor with one row for each seed of the batch,
    logits or embeddings; rows beyond the seeds are left out. Every rank writes its share of the nodes batch by batch,
    so it holds one batch at a time. The file appears under its name when it is complete. Ranks on several
    hosts need storage that they share.

    Of a task that recommends, row ``q`` has ``k`` records ``receiver`` and ``score`` for question ``q``, as
    :class:`Recommended` tells; a table has a row for each of them, with ``question``, ``sender`` and ``time``, too.

    Args:
        path: The file, with the suffix ``.npy``, or ``.parquet`` or ``.csv``, which need pyarrow. Tables name nodes by
            their ids, questions of a database by the columns of their table, and classes by the words of labels.
        overwrite: Replace an existing file.
        ids_of: For a table, the prepared graph whose ids nodes have, of a split or of shards the one that these
            were made of. Default: the graph that is predicted; where it knows none, nodes are numbered from 0.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False, ids_of: str | Path | None = None) -> None:
        self.path = check_rows_file("path", path)
        self.ids_of = check_ids_of(self.path, ids_of)
        check_true_or_false(overwrite=overwrite)
        self.overwrite = overwrite
        self._rows: SharedRows | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not hasattr(_datamodule(trainer), "num_nodes"):
            raise TypeError("PredictionWriter needs the nodes of a graph in order: use PartitionedDataModule.")
        if is_limit(trainer.limit_predict_batches):
            raise ValueError(
                f"limit_predict_batches={trainer.limit_predict_batches!r} would leave rows without a prediction: "
                "PredictionWriter writes all nodes. Leave the limit out."
            )
        check_no_file(self.path, overwrite=self.overwrite)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        data, records = _datamodule(trainer), getattr(outputs, "records", None)  # of a task that recommends
        rows = rows_of(outputs, batch.batch_size) if records is None else records
        some = getattr(data, "predicted", None)
        if self._rows is None:
            count = data.num_nodes if some is None else len(some)
            columns = data.node_columns(self.ids_of) if self.path.suffix in TABLES else NodeColumns()
            self._rows = SharedRows(self.path, count, pl_module.device, columns=columns)
        if records is not None:
            self._rows.write(data.places_of(outputs.questions), rows)
            return
        at = (batch.n_id[: batch.batch_size] if some is None else store_of_seeds(batch).input_id).cpu().numpy()
        is_asked = np.full(len(at), True) if some is None else at < len(some)  # of fewer nodes than ranks one is twice
        self._rows.write(at[is_asked], rows[is_asked])

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish the file. All ranks come here, after each has written its share."""
        if self._rows is not None:
            self._rows.publish()
            self._rows = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._discard()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._discard()

    def _discard(self) -> None:
        """Delete a draft that was not published."""
        if self._rows is not None:
            self._rows.discard()
            self._rows = None


def _datamodule(trainer: Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]
