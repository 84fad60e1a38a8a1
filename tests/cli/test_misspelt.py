"""Advice from the complaint alone."""

import pytest

from lightning_gnn_dist.cli.mistakes import check_strategy, hint

NAMES = {"seed_everything", "data.graph", "data.batch_size", "data.bulk_size", "trainer.max_epochs", "model"}


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("Group 'data' does not accept option 'bach_size'", "There is no 'bach_size'. Did you mean 'batch_size'?"),
        ("Subcommand 'fit' does not accept option 'trainr.max_epochs'", "Did you mean 'trainer'?"),
        ("Option 'seed_evrything' is not accepted", "Did you mean 'seed_everything'?"),
        ("unrecognized arguments: --data.grph=x -y", "Did you mean 'graph'?"),
        ("Group 'data' does not accept option 'xyz'", "There is no 'xyz': data takes batch_size, bulk_size, graph."),
        (
            "- Problem with given class_path 'torch.optim.Adam':\n    Option 'wieght_decay' is not accepted",
            "Did you mean 'weight_decay'?",
        ),
        (
            "- Problem with given class_path 'lightning_gnn_dist.LLCGStrategy':\n  Option 'wights' is not accepted",
            "Did you mean 'weights'?",
        ),
        ("module 'lightning_gnn_dist' has no attribute 'EveryStep'", "Did you mean 'EverySteps'?"),
        ("No module named 'my_modules'", "There is no module 'my_modules': it must be installed, or lie in"),
        ("Given value: {'class_pth': 'a.B', 'init_args': {}}", "Did you mean 'class_path'?"),
    ],
)
def test_a_complaint_is_answered(message: str, advice: str) -> None:
    assert advice in (hint(message, NAMES) or "")


@pytest.mark.parametrize(
    "message",
    [
        "Expected a <class 'int'>. Got value: x",
        "- Problem with given class_path 'nowhere.B':\n    Option 'b' is not accepted",
        "Given value: {'class_path': 'a.B', 'init_args': {}}",
    ],
)
def test_other_complaints_are_left_alone(message: str) -> None:
    assert hint(message, NAMES) is None


@pytest.mark.parametrize("name", ["auto", "ddp", "grappa", "lightning_gnn_dist.GrappaStrategy", None])
def test_names_and_classes_of_strategies_are_known(name: str | None) -> None:
    check_strategy(name)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("grapa", "There is no 'grapa'. Did you mean 'grappa'?"),
        ("GrappaStrategy", "A class is named with its module. Did you mean 'lightning_gnn_dist.GrappaStrategy'?"),
        ("lightning_gnn_dist.GrapaStrategy", "Did you mean 'lightning_gnn_dist.GrappaStrategy'?"),
        (
            "my.Own",
            "a class is named by class_path, --trainer.strategy.class_path=my.Own, or in a file strategy: {class",
        ),
    ],
)
def test_what_is_no_strategy_is_refused_with_what_is(name: str, advice: str) -> None:
    with pytest.raises(ValueError, match=r"^trainer\.strategy: ") as refused:
        check_strategy(name)
    assert advice in str(refused.value)
