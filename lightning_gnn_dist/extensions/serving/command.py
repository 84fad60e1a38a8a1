"""``lightning-gnn-dist serve``: answer requests by HTTP with the rows of a trained model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_gnn_dist.checks import check_file, check_path
from lightning_gnn_dist.extensions.serving.answering import Answerer
from lightning_gnn_dist.extensions.serving.question import Limits

_NEEDS = "starlette", "uvicorn"


class ServingTrainer(Trainer):
    """A trainer that serves: it says with which precision, and on which device, the model computes."""

    @staticmethod
    def check_extra() -> None:
        """Refuse to serve without the libraries that do it."""
        if missing := [name for name in _NEEDS if find_spec(name) is None]:
            raise SystemExit(
                f"lightning-gnn-dist serve: {' and '.join(missing)} must be installed to serve: "
                "pip install 'lightning-gnn-dist[serve]'."
            )

    def serve(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        host: str = "127.0.0.1",
        port: NonNegativeInt = 8000,
        neighbors: PositiveInt = 1000,
        ids_of: str | None = None,
        limits: Limits = Limits(),  # noqa: B008  # frozen
    ) -> None:
        """Answer requests by HTTP with the rows of a trained model.

        Args:
            model: The model.
            datamodule: Its nodes are predicted.
            ckpt_path: The checkpoint with the weights.
            host: The address to listen on; others than this machine reach 0.0.0.0.
            port: The port; 0 takes one that is free.
            neighbors: Neighbours that are drawn of a node where the data module takes all; with fewer, rows are exact.
            ids_of: The prepared graph by whose tables' ids nodes are named. Default: they are named by numbers.
            limits: What the server does at most.
        """
        if ckpt_path is None:
            raise ValueError("serve needs the weights of a trained model: name a checkpoint, --ckpt_path=model.ckpt.")
        load_weights(self, model, ckpt_path)
        folder = None if ids_of is None else check_path("ids_of", ids_of)
        answerer = Answerer(self, model, datamodule, limits, neighbors, folder)
        answerer.warm_up()
        from lightning_gnn_dist.extensions.serving.app import (
            Service,  # these need what check_extra asks for
            listen,
            run,
        )

        with listen(host, port) as listening:
            where = f"http://{host}:{listening.getsockname()[1]}"
            service = Service(answerer, limits)
            run(service.app(), listening, limits.seconds, lambda: _tell(where, answerer.about))


def load_weights(trainer: Trainer, model: LightningModule, path: str) -> None:
    """Give a model the weights of a checkpoint, of which nothing but tensors and plain values is read."""
    checkpoint = torch.load(check_file("ckpt_path", path), map_location="cpu", weights_only=True)
    if "state_dict" not in checkpoint:
        raise ValueError(f"ckpt_path must be a checkpoint that a fit has kept, and {path!r} has no state_dict.")
    model.configure_model()
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"], strict=model.strict_loading)
    trainer.precision_plugin.convert_module(model).to(trainer.strategy.root_device)


def _tell(where: str, about: dict[str, Any]) -> None:
    known = ", ".join(f"{name}: {value}" for name, value in about.items())
    print(f"Serving on {where} ({known}). End it with SIGTERM or Ctrl+C.", flush=True)
