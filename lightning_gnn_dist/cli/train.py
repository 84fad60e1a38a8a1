"""``lightning-gnn-dist fit|validate|test|predict|serve``: a LightningCLI with the package's data module.

A module is named by its class path and looked for in the working directory too; strategies, samplers and
partitioners are named the same way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_gnn_dist.callbacks.predictions import PredictionWriter
from lightning_gnn_dist.callbacks.preemption import PreemptionCheckpoint
from lightning_gnn_dist.callbacks.run_report import RunReport
from lightning_gnn_dist.cli.config_file import check_files
from lightning_gnn_dist.cli.mistakes import (
    REFUSALS,
    check_strategy,
    check_values,
    hint,
    in_one_line,
    own_refusal,
    reading_checkpoint,
    with_path,
)
from lightning_gnn_dist.cli.options import BY_LAYER, PROGRAM, PURPOSE, SERVE, nodes_named, words_in
from lightning_gnn_dist.data.datamodule import GraphDataModule, PartitionedDataModule, what_is_judged
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.user_ids import nodes_with_ids
from lightning_gnn_dist.names import extension, imported
from lightning_gnn_dist.wire.launching.processes import LEFT_BY_SIGTERM

FIT, OF_WEIGHTS = "fit", ("validate", "test", "predict")
OF_FIT = {"report": True, "weights_only": None}  # options that other commands do not take, and their defaults


def run(arguments: Sequence[str] | None = None) -> None:
    """Do what the arguments, or those of this process, say."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        check_files(given[1:])
    except REFUSALS as error:
        raise SystemExit(f"{PROGRAM} {given[0]}: {error}") from error
    if os.getcwd() not in sys.path:  # where a user's own module lies; a console script does not look there
        sys.path.append(os.getcwd())  # at the end: a file there takes no library's place
    trainer_class: type[Trainer] = Trainer
    if given[:1] == [SERVE]:
        trainer_class = extension("serve")
        trainer_class.check_extra()  # type: ignore[attr-defined]
    try:
        TrainCLI(
            given[:1],
            LightningModule,
            PartitionedDataModule,
            trainer_class=trainer_class,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            parser_kwargs={"prog": PROGRAM, "description": PURPOSE},
            save_config_callback=ConfigBesideLogs,
            args=None if arguments is None else list(arguments),
        )
    except SIGTERMException as error:
        raise SystemExit(LEFT_BY_SIGTERM) from error  # under Lightning's own strategies, too


class Parser(LightningArgumentParser):
    """Names the nearest right name where one is misspelt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names: set[str] = set()  # those of all commands, where it has commands

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Data may be any data module by its class path, and without one a ``PartitionedDataModule``."""
        if nested_key != "data":
            return super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, required)
        classes = (lightning_class, LightningDataModule)
        added: list[str] = self.add_subclass_arguments(classes, nested_key, fail_untyped=False, required=required)
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        way_out = hint(message, self.names or set(self.get_defaults().keys()))
        brief = in_one_line(message, way_out) if self.exit_on_error else None  # others go on with what is said
        super().error(brief or (message if way_out is None else f"{message}\n{way_out}"), ex)

    def print_usage(self, file: Any = None) -> None:
        """Nothing: it is asked for before an error alone, which names ``--help``, and would fill the screen."""


class ConfigBesideLogs(SaveConfigCallback):
    """Keeps the configuration of a run in the directory of its logger; without one there is no place for it.

    All commands read it: what ``fit`` alone takes is left out, where it is the default.
    """

    def __init__(self, parser: LightningArgumentParser, config: Any, *args: Any, **kwargs: Any) -> None:
        config = config.clone()
        for name, default in OF_FIT.items():
            if config.get(name) == default:
                config.pop(name, None)
        super().__init__(parser, config, *args, **kwargs)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


class TrainCLI(LightningCLI):
    """The commands, or the one that was ``given``: the options of each take a tenth of a second to collect."""

    parser: Parser

    def __init__(self, given: Sequence[str], *args: Any, **kwargs: Any) -> None:
        self._given = given
        super().__init__(*args, **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        commands = LightningCLI.subcommands()
        commands["predict"].add("return_predictions")  # to whom? They need not fit into RAM
        if self.trainer_class is not Trainer:
            return {SERVE: {"model", "datamodule"}}
        return {name: skip for name, skip in commands.items() if name in self._given} or commands

    def _parse_ckpt_path(self) -> None:
        """Called with the options, before there are objects."""
        try:
            with reading_checkpoint(self.config[self.config.subcommand].get("ckpt_path")):
                super()._parse_ckpt_path()
        except REFUSALS as error:
            self.parser.error(str(error), error)

    def instantiate_classes(self) -> None:
        """Make the objects that the configuration names."""
        self.parser.add_instantiator(self._make, object)
        with self._refusals_in_one_line():
            check_values(self.config[self.subcommand])
            check_strategy(self.config[self.subcommand].trainer.strategy)
            super().instantiate_classes()

    def _make(self, kind: type, *args: Any, **kwargs: Any) -> object:
        """Called for all but model and data, where jsonargparse would go on to look for another type that fits."""
        with self._refusals_in_one_line(kwargs if is_dataclass(kind) else {}):
            return kind(*args, **kwargs)

    @contextmanager
    def _refusals_in_one_line(self, given: Mapping[str, Any] = {}) -> Iterator[None]:  # never changed
        """What this package refuses is told as what the parser refuses is; of a value made of ``given``, its path."""
        try:
            yield
        except REFUSALS as error:
            model = getattr(self, "model", None)
            if (reason := own_refusal(error, None if model is None else type(model).__module__)) is None:
                raise
            self.parser.error(with_path(reason, self.config[self.subcommand], given), error)

    def _run_subcommand(self, subcommand: str) -> None:
        """Called when all objects are there. A fit that ends in its middle says where, by a traceback."""
        if subcommand == FIT:
            super()._run_subcommand(subcommand)
            return
        if subcommand in OF_WEIGHTS and self.config[subcommand].ckpt_path is None:
            rank_zero_info(f"No --ckpt_path: {subcommand} computes with the weights that the model begins with.")
        with self._refusals_in_one_line():
            super()._run_subcommand(subcommand)

    def before_fit(self) -> None:
        """Called when the trainer is there: watch what the fit costs, and let a preempted one go on."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if self.trainer.checkpoint_callback is not None and not _has(callbacks, PreemptionCheckpoint):
            callbacks.insert(0, PreemptionCheckpoint())
        if self.config_init.fit.report and not _has(callbacks, RunReport):
            callbacks.insert(0, RunReport())

    def predict(self, **kwargs: Any) -> None:
        """Called in place of ``trainer.predict``."""
        options = self.config_init.predict
        if options.output is not None and Path(options.output).exists() and not options.overwrite:
            raise FileExistsError(f"{options.output} exists already. Name another --output, or --overwrite true.")
        by_layer = imported(BY_LAYER)
        if by_layer is not None and by_layer.predict(self.trainer, options, **kwargs):
            return
        if options.nodes is not None:
            kwargs["datamodule"] = _only(self.datamodule, options)
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if options.output is not None:
            callbacks.append(PredictionWriter(options.output, overwrite=options.overwrite, ids_of=options.ids_of))
        elif not _has(callbacks, PredictionWriter, BasePredictionWriter):
            self.parser.error("predict would keep nothing: name a file for its rows, --output=logits.npy.")
        self.trainer.predict(return_predictions=False, **kwargs)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            about = "add RunReport: a table of what the fit has cost"
            parser.add_argument("--report", type=bool, default=True, help=about)
        if subcommand == "predict":
            parser.add_argument(
                "--output", type=str | None, help="the .npy, .parquet or .csv to write, a row for each node or question"
            )
            parser.add_argument("--overwrite", type=bool, default=False, help="replace a file that is there")
            about = "predict these alone: ids with commas, or a file with an id in each line"
            parser.add_argument("--nodes", type=str | None, help=about)
            about = "--nodes are ids of the tables that the graph was prepared from"
            parser.add_argument("--by_user_id", type=bool, default=False, help=about)
            about = "the prepared graph whose ids nodes have, where that is not the one that is predicted"
            parser.add_argument("--ids_of", type=str | None, help=about)
            if (by_layer := imported(BY_LAYER)) is not None:
                by_layer.add_options(parser)
        self.parser.names |= set(parser.get_defaults().keys())
        return parser


def _only(datamodule: Any, options: Any) -> Any:
    """Return a data module that predicts the nodes that the command line names."""
    if not isinstance(datamodule, GraphDataModule) or not hasattr(datamodule, "only"):
        raise TypeError(f"--nodes={options.nodes} names nodes, and {type(datamodule).__name__} has none: leave it out.")
    return datamodule.only(nodes_asked(datamodule, options))


def nodes_asked(datamodule: GraphDataModule, options: Any) -> list[int] | Tensor:
    """The nodes that the command line names, by ids in the graph, or in the tables it was prepared from."""
    if not options.by_user_id:
        return nodes_named(options.nodes)
    graph = what_is_judged(datamodule)
    folder = options.ids_of or (graph.path if isinstance(graph, Graph) else None)
    if folder is None:
        raise ValueError(
            "--by_user_id needs a prepared graph, which knows the ids of nodes: name it, --ids_of=my_graph."
        )
    return nodes_with_ids(folder, words_in(options.nodes), datamodule._judging.home.types.seed_type())


def _has(callbacks: Iterable[Callback], *kinds: type[Callback]) -> bool:
    return any(isinstance(callback, kinds) for callback in callbacks)
