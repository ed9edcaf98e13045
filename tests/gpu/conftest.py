"""A table at the end of the session: each check with its cases, seconds and largest difference."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest


@pytest.fixture
def apart(record_property: Any) -> Any:
    """Return a function that notes how far two computations are apart, for the table."""
    return lambda value: record_property("apart", float(value))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table."""
    found: dict[str, list[Any]] = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                found[report.nodeid.split("::")[1].partition("[")[0]].append(report)
    if not found:
        return
    import torch

    write = terminalreporter.write_line
    write(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    write(f"{'check':<88}{'passed':>7}{'failed':>7}{'seconds':>9}{'apart':>10}")
    for name, reports in sorted(found.items()):
        passed, seconds = sum(report.passed for report in reports), sum(report.duration for report in reports)
        worst = [value for report in reports for key, value in report.user_properties if key == "apart"]
        shown = f"{max(worst):.1e}" if worst else "-"
        text = name.removeprefix("test_").replace("_", " ")
        write(f"{text:<88}{passed:>7}{len(reports) - passed:>7}{seconds:>9.1f}{shown:>10}")
