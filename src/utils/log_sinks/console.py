"""The block of recent values that a run shows at every log."""

from __future__ import annotations

import logging
import math
import re
import shutil

from omagd.utils.log_sinks.base import Record, RunFacts, Sink

NAME_WIDTH = 27
VALUE_WIDTH = 11
GAP = 3
HEADLINE = ("t_env", "epoch", "episode")
WHOLE = {"updates", "lost_episodes", "restarts", "worker_restarts"}
DETAIL = re.compile(r"_(self|ally|enemy)(_f\d+)?$")
PHASE = "time/"
RANK = re.compile(r"^(.+)_rank(\d+)$")
RANKS_SHOWN = 16
LEAST_SHARE = 0.001


class ConsoleSink(Sink):
    """One block per record, through Python's logging.

    Args:
        logger: where the block goes; the package's own if None.
    """

    name = "console"

    def __init__(self, logger: logging.Logger | None = None) -> None:
        super().__init__()
        self.logger = logger or logging.getLogger("omagd")
        self._facts: RunFacts | None = None

    def _open(self, facts: RunFacts) -> None:
        self._facts = facts

    def _log(self, record: Record) -> None:
        self.logger.info("%s", render_block(record, self._facts))

    def _close(self, exit_state: str) -> None:
        self._facts = None


def render_block(record: Record, facts: RunFacts | None = None, width: int | None = None) -> str:
    """Return the block: a headline, then the values in aligned columns, by name, tests first.

    Measures of one type of node (`…_ally`) or feature (`…_ally_f3`) are left to the files. Shares of the wall time and
    what single ranks measure stand in lines of their own.

    width: of the terminal in characters; asked for if None.
    """
    totals = facts.totals if facts else {}
    head = ["Recent Stats", f"{record.clock}: {_of(record.t, totals.get(record.clock))}"]
    if "episode" in record.values:
        head.append(f"Episode: {_of(int(record.values['episode']), totals.get('episode'))}")
    head.append(" · ".join(part for part in (record.stage, facts.label if facts else "") if part))
    apart = {name for name in record.values if name.startswith(PHASE) or RANK.match(name)}
    shown = [name for name in record.values if name not in {*HEADLINE, *apart} and not DETAIL.search(name)]
    names = sorted(shown, key=lambda name: (not name.startswith("test_"), name))
    width = width or shutil.get_terminal_size((120, 24)).columns
    name_width = max([NAME_WIDTH, *map(len, names)])
    cell = name_width + VALUE_WIDTH
    columns = max(1, min(4, (width + GAP - 2) // (cell + GAP)))
    rows = math.ceil(len(names) / columns)
    lines = [" | ".join(head)]
    for row in range(rows):  # down the columns, so that neighbours in name stay neighbours
        cells = [
            f"{name:<{name_width}}{_number(name, record.values[name]):>{VALUE_WIDTH}}" for name in names[row::rows]
        ]
        lines.append("  " + (" " * GAP).join(cells))
    return "\n".join([*lines, *_lines_apart(record.values)])


def _of(at: int, total: int | None) -> str:
    """Return how far something is, with where it ends if that is known."""
    return f"{at:,}" + (f" / {total:,}" if total else "")


def _lines_apart(values: dict[str, float]) -> list[str]:
    """Return where the time went, largest first, and what each rank measured."""
    phases = {name.removeprefix(PHASE): value for name, value in values.items() if name.startswith(PHASE)}
    largest = sorted(phases.items(), key=lambda item: -item[1])
    parts = " · ".join(f"{name} {100 * share:.1f} %" for name, share in largest if share >= LEAST_SHARE)
    lines = [f"  time   {parts}"] * bool(phases)
    ranks: dict[str, list[str]] = {}
    for name, value in values.items():
        if found := RANK.match(name):
            ranks.setdefault(found[1], []).append(f"{value:.4g}")
    return [*lines, *(f"  {name} by rank: {', '.join(each[:RANKS_SHOWN])}" for name, each in ranks.items())]


def _number(name: str, value: float) -> str:
    """Return a number in at most 10 characters: four decimals, whole where whole and large, else in powers of ten."""
    if value == 0 and name not in WHOLE or not math.isfinite(value):
        return f"{value:.4f}"
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value)}" if abs(value) >= 1000 or name in WHOLE else f"{value:.4f}"
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.1f}"
