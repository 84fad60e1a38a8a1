"""Fits that are compared: on shards, and on parts of the whole graph."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist import PredictionWriter
from tests.data_fitting import trainer
from tests.ranks import run_ranks

Result = tuple[list[Tensor], dict[str, float]]


def all_figures(world_size: int, strategy: Any, model: Any, data: Any, path: str) -> Result:
    """The weights of a fit, its metrics and those of a test; predictions are written to a file."""
    fitting = trainer(world_size, strategy, callbacks=[PredictionWriter(path, overwrite=True)])
    fitting.fit(model, data)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    names = [name for name in ("loss", "accuracy", "val_acc") if name in fitting.callback_metrics]
    metrics = {name: float(fitting.callback_metrics[name]) for name in names}
    (tested,) = fitting.test(model, data, verbose=False)
    fitting.predict(model, data, return_predictions=False)
    return weights, metrics | {f"test {name}": value for name, value in tested.items()}


def check_alike(fit: Any, folder: Path, *args: Any) -> None:
    """The weights, metrics and predictions that ``fit`` finds on shards are those that it finds on the whole graph."""
    shards, parts = (run_ranks(fit, 2, str(folder), kind, *args) for kind in ("shards", "whole"))
    for (ours, figures), (theirs, expected) in zip(shards, parts, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
        assert len(figures) > 1 and figures == expected
    assert (folder / "shards.npy").read_bytes() == (folder / "whole.npy").read_bytes()
