"""Every node's row is in the file, at its place, whatever the number of ranks; and nothing else is left behind."""

import errno
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from tests.data_fitting import trainer
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE

NUM_NODES = 301  # two and three ranks have unequal shares


class Speaker(SAGE):
    """Predicts logits, or whatever it is told to."""

    said: Any = None

    def predict_step(self, batch: Any) -> Any:
        logits = self(batch)
        return logits if self.said is None else self.said(logits, batch)


def graph() -> lgd.Graph:
    return lgd.communities(NUM_NODES, 4, num_features=8)


def predict(path: Path, world_size: int, said: Any = None, **options: Any) -> None:
    pl.seed_everything(0, verbose=False)
    model = Speaker(8, 4)
    model.said = said
    data = lgd.PartitionedDataModule(
        graph(), sampler=lgd.NeighborSampler([3, 3]), batch_size=16, evaluation=lgd.Evaluation(batch_size=40)
    )
    writer = lgd.PredictionWriter(path, overwrite=options.pop("overwrite", False))
    strategy = lgd.LocalSGDStrategy() if world_size > 1 else "auto"
    predictor = trainer(world_size, strategy, callbacks=[writer], **options)
    assert predictor.predict(model, data, return_predictions=False) is None


def on_the_whole_graph() -> Tensor:
    """The same model, full batch."""
    pl.seed_everything(0, verbose=False)
    model, whole = Speaker(8, 4), graph()
    receiver = torch.arange(NUM_NODES).repeat_interleave(whole.degrees())
    edge_index = torch.stack([whole.indices.long(), receiver])
    x = model.convs[0](whole.node_arrays["x"], edge_index).relu()
    logits: Tensor = model.convs[1](x, edge_index).detach()
    return logits


def predict_on_rank(rank: int, world_size: int, path: Path) -> None:
    predict(path, world_size)
    assert path.exists()  # on every rank, as soon as it returns


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_file_holds_what_one_process_would_say(world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "there" / "logits.npy"
    run_ranks(predict_on_rank, world_size, path)
    found = np.load(path)
    assert found.dtype == np.float32 and found.shape == (NUM_NODES, 4)
    assert torch.allclose(torch.from_numpy(found), on_the_whole_graph(), atol=1e-5)
    assert [file.name for file in path.parent.iterdir()] == ["logits.npy"]


@pytest.mark.parametrize(
    ("said", "dtype", "shape"),
    [
        (lambda logits, batch: logits.argmax(1), np.int64, ()),
        (lambda logits, batch: logits.bfloat16(), np.float32, (4,)),
        (lambda logits, batch: logits.view(-1, 2, 2).half(), np.float16, (2, 2)),
    ],
)
def test_rows_may_be_of_any_kind(said: Any, dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    predict(tmp_path / "rows.npy", 1, said)
    found = np.load(tmp_path / "rows.npy")
    assert found.dtype == dtype and found.shape == (NUM_NODES, *shape)


def test_rows_beyond_the_seeds_are_left_out(tmp_path: Path) -> None:
    predict(tmp_path / "rows.npy", 1, lambda logits, batch: batch.n_id)
    assert np.load(tmp_path / "rows.npy").tolist() == list(range(NUM_NODES))


def ragged(logits: Tensor, batch: Any) -> Tensor:
    return logits if batch.n_id[0] == 0 else logits[:, :2]


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (lambda logits, batch: (batch.n_id, logits), TypeError, "it returned a tuple: return logits or embeddings"),
        (lambda logits, batch: logits[:2], TypeError, r"it returned a tensor of \(2, 4\)"),
        (ragged, ValueError, r"returned float32 \(\d+, 2\) for \d+ seeds, after rows of float32 \(4,\)"),
    ],
)
def test_other_results_are_refused_and_no_draft_is_left(
    said: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        predict(tmp_path / "rows.npy", 1, said)
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    predict(path, 1)
    with pytest.raises(FileExistsError, match=r"rows\.npy exists already.*overwrite=True"):
        predict(path, 1)
    predict(path, 1, lambda logits, batch: logits.argmax(1), overwrite=True)
    assert np.load(path).dtype == np.int64


def test_what_would_leave_holes_is_refused(tmp_path: Path) -> None:
    for limit in (2, 1):
        with pytest.raises(ValueError, match=f"limit_predict_batches={limit} would leave rows without a prediction"):
            predict(tmp_path / "rows.npy", 1, limit_predict_batches=limit)
    with pytest.raises(ValueError, match=r"written as .npy, .parquet or .csv, and 'rows.pt' ends otherwise"):
        lgd.PredictionWriter("rows.pt")


def test_ids_of_a_larger_graph_are_refused(tmp_path: Path) -> None:
    part = lgd.communities(200, 4).induced(torch.arange(0, 200, 2))
    data = lgd.PartitionedDataModule(part, sampler=lgd.NeighborSampler([2]), batch_size=10)
    predictor = trainer(1, callbacks=[lgd.PredictionWriter(tmp_path / "a.npy")])
    model = pl.LightningModule()
    model.predict_step = lambda batch: batch.x[: batch.batch_size]  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match=r"a row for node \d+, and the graph has 100 nodes .*node_arrays\.pop"):
        predictor.predict(model, data, return_predictions=False)
    assert not list(tmp_path.iterdir())
    del part.node_arrays["n_id"]
    predictor.predict(model, data, return_predictions=False)
    assert np.load(tmp_path / "a.npy").shape == (100, 64)


def fail_on_one_rank(rank: int, world_size: int, path: Path) -> None:
    def said(logits: Tensor, batch: Any) -> Tensor:
        if rank == 1 and batch.n_id[0] > NUM_NODES // 2 + 50:
            raise OSError(errno.EIO, "the model broke")
        return logits

    predict(path, world_size, said)


def test_a_rank_that_fails_leaves_no_half_file(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the model broke"):
        run_ranks(fail_on_one_rank, 2, tmp_path / "rows.npy", grace=1)
    assert not list(tmp_path.iterdir())


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, place: whole(file, content[:100], place))
    predict(tmp_path / "rows.npy", 1)
    assert torch.allclose(torch.from_numpy(np.load(tmp_path / "rows.npy")), on_the_whole_graph(), atol=1e-5)
