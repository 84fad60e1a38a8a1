"""In a copy without some extensions, what tries another with one of them is skipped."""

from collections.abc import Generator

import pytest

from tests.extensions import MISSING


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    lacks = ("ModuleNotFoundError", "ImportError", "AttributeError")
    if MISSING and report.failed and any(error in str(report.longrepr) for error in lacks):
        report.outcome = "skipped"
        report.longrepr = str(collector.path), 0, f"needs one of {MISSING}"
    return report
