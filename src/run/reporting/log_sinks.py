"""Log sinks, the outputs for a run's values: console, `metrics.jsonl`, TensorBoard, Sacred; and the log of episodes.

W&B is in `wandb_sink.py`. To add a sink, derive a class from `omagd.utils.logging.Sink` and name it in
`BUILT_IN` and in `training/experiment.py`, or in the entry-point group `omagd.log_sinks` of an installed package.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omagd.run.reporting.report import number_text
from omagd.run.run_folder import RunFolder, plain, read_records, unlinked
from omagd.utils.logging import Logger, Record, RunFacts, Sink, duration, warn_off
from omagd.utils.registry import Registry
from omagd.utils.storage import AppendFile, open_records

BUILT_IN = {
    "console": "omagd.run.reporting.log_sinks:ConsoleSink",
    "jsonl": "omagd.run.reporting.log_sinks:JsonLinesSink",
    "tensorboard": "omagd.run.reporting.log_sinks:TensorBoardSink",
    "sacred": "omagd.run.reporting.log_sinks:SacredSink",
    "wandb": "omagd.run.reporting.wandb_sink:WandbSink",
}
MOST = 500
"""Values that Sacred gets of each name."""

REGISTRY: Registry[Callable[..., Sink]] = Registry("log sink", "omagd.log_sinks", lazy=BUILT_IN)


def make_logger(
    facts: RunFacts, names: Iterable[str], console_logger: logging.Logger, *, minimal: bool = False, sacred: Any = None
) -> Logger:
    """Return a logger with the sinks `names` and every sink that a plug-in has registered.

    sacred: the Sacred run, or what passes scalars on to it; without it the sink "sacred" is left out.
    Errors: UserError for an unknown name.
    """
    logger = Logger(console_logger, minimal, facts)
    if minimal:
        return logger
    arguments = {"sacred": (sacred,), "console": (console_logger,)}
    for name in names:
        if name != "sacred" or sacred is not None:
            logger.add_sink(REGISTRY.get(name)(*arguments.get(name, ())))
    for name in sorted(set(REGISTRY.names()) - BUILT_IN.keys()):
        try:
            sink = REGISTRY.get(name)()
            if not isinstance(sink, Sink):
                raise TypeError(f"{type(sink).__name__} is not derived from Sink")
        except Exception as error:  # noqa: BLE001 (a plug-in's)
            warn_off(name, error)
        else:
            sink.key = name
            logger.add_sink(sink)
    return logger


class JsonLinesSink(Sink):
    """Appends one line per log to `metrics.jsonl`: stage, clock, values. NaN and infinities become null."""

    name = "metrics.jsonl"
    essential = True

    def _open(self, facts: RunFacts) -> None:
        self._file = AppendFile(RunFolder(facts.folder).metrics_jsonl)

    def _log(self, record: Record) -> None:
        line = {"stage": record.stage, record.clock: record.t, **record.values}
        self._file.write((_line(line) + "\n").encode())

    def _close(self, exit_state: str) -> None:
        self._file.close()


_encode = json.JSONEncoder(allow_nan=False).encode


def _line(values: Mapping[str, Any]) -> str:
    """Return values as strict JSON; plain numbers, which rounds have by the thousand, are not converted first."""
    try:
        return _encode(values)
    except (TypeError, ValueError):
        return _encode(plain(values))


class EpisodeLog(AppendFile):
    """A rank's file of episodes; a resumed run truncates it first."""

    def add(self, episodes: Iterable[Mapping[str, Any]], **common: Any) -> None:
        """Write episodes, each with the `common` values in front."""
        lines = [_line({**common, **episode, **common}) for episode in episodes]
        if lines:
            self.write(("\n".join(lines) + "\n").encode())


def logged_before(folder: Path) -> Iterator[Record]:
    """Yield the records of a run's `metrics.jsonl`: at the start of a sink, of earlier starts."""
    for line in read_records(RunFolder(folder).metrics_jsonl):
        clock = "t_env" if "t_env" in line else "epoch"
        values: dict[str, Any] = {name: math.nan if value is None else value for name, value in line.items()}
        if {"stage", clock} <= values.keys():
            yield Record(values, values.pop("stage"), clock, values.pop(clock))


class SacredScalars:
    """Gives Sacred's run scalars: of each name later ones only, since a restart logs some again."""

    def __init__(self, run: Any, prefix: str = "") -> None:
        self._run, self._prefix, self._last = run, prefix, dict[str, float]()

    def log_scalar(self, name: str, value: float, t: float) -> None:
        """Record a value at `t`."""
        if t > self._last.get(name, -math.inf):
            self._last[name] = t
            self._run.log_scalar(self._prefix + name, value, t)


class SacredSink(Sink):
    """Records finite values as Sacred scalars, `(key, value, t)`: of each name at most `MOST`, evenly spaced.

    Sacred writes all values again at each heartbeat; `metrics.jsonl` has every one. It has one time axis per name, so
    names of stages 1 and 2 are prefixed with the stage.

    Args:
        target: has `log_scalar`: `SacredScalars`, or a spawned rank's `Notes` to the process that has it.
    """

    name = "Sacred's scalars"

    def __init__(self, target: Any) -> None:
        self._target = target
        self._due: dict[str, float] = {}

    def _log(self, record: Record) -> None:
        for key, value in record.values.items():
            name = key if record.stage == "stage3" else f"{record.stage}/{key}"
            total = self.facts.totals.get(record.clock, 0)
            if math.isfinite(value) and record.t >= min(self._due.get(name, 0.0), total):  # the last one always
                self._due[name] = record.t + total / MOST
                self._target.log_scalar(name, value, record.t)


class TensorBoardSink(Sink):
    """Writes event files to `<run folder>/tb/<stage>` (`use_tensorboard=True`); the step is the stage's clock."""

    name = "TensorBoard"

    def _open(self, facts: RunFacts) -> None:
        self._writers: dict[str, EventFile] = {}
        self._last = {record.stage: record.t for record in logged_before(facts.folder)}
        import torch.utils.tensorboard  # noqa: F401  (fail at the start, not at the first log)

    def _log(self, record: Record) -> None:
        if record.stage not in self._writers:
            # A resumed run logs again what the killed one logged after the checkpoint: hide the first version.
            folder = unlinked(self.facts.folder, f"tb/{record.stage}")
            self._writers[record.stage] = EventFile(folder, self._last.get(record.stage, -1) + 1)
        self._writers[record.stage].add(record.values, record.t)

    def _picture(self, name: str, path: Path, record: Record) -> None:
        self._writers[record.stage].add_picture(name, path.read_bytes(), record.t)

    def _close(self, exit_state: str) -> None:
        for writer in self._writers.values():
            writer.close()


class EventFile(AppendFile):
    """A TensorBoard event file, written in the calling thread.

    `SummaryWriter` writes in its own thread: a full disk ends that thread with a traceback, and its queue is lost.

    Args:
        folder: of a stage. purge: TensorBoard hides events of earlier files from this step on.
    """

    def __init__(self, folder: Path, purge: int) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        super().__init__(folder / name, open_records)
        self._records = RecordWriter(self)
        self._write(file_version="brain.Event:2")
        self._write(step=purge, session_log={"status": "START"})

    def add(self, values: dict[str, float], step: int) -> None:
        """Write scalars by name."""
        scalars = [{"tag": name, "simple_value": value} for name, value in values.items()]
        self._write(step=step, summary={"value": scalars})

    def add_picture(self, name: str, content: bytes, step: int) -> None:
        """Write the content of a PNG or GIF file; TensorBoard plays a GIF."""
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            wide, high = image.size
        shown = {"width": wide, "height": high, "colorspace": 3, "encoded_image_string": content}
        self._write(step=step, summary={"value": [{"tag": name, "image": shown}]})

    def _write(self, **fields: Any) -> None:
        """Write an event; protobuf takes dictionaries for the messages in it."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())


NAME_WIDTH = 27
VALUE_WIDTH = 11
GAP = 3
HEADLINE = ("t_env", "epoch", "episode")
DETAIL = re.compile(r"_(self|ally|enemy)(_f\d+)?$|_(never|before|age\d+(_\d+)?)$")
PHASE = "time/"
RANK = re.compile(r"^(.+)_rank(\d+)$")
OF_MAP = re.compile(r"^(test|train)/(.+)/(\w+?)(?:_mean)?$")
LEAST_SHARE = 0.001


COLUMNS = {
    "t_env": {
        "win rate": ("test_battle_won_mean",),
        "return": ("test_return_mean", "return_mean"),
        "length": ("test_ep_length_mean", "ep_length_mean"),
        "epsilon": ("epsilon",),
        "loss": ("loss_td", "loss_ppo", "loss*"),
        "steps/s": ("steps_per_second",),
    },
    "epoch": {
        "loss": ("train/graph_loss", "test/graph_loss"),
        "held-out": ("eval/graph_loss",),
        "top-1": ("eval/top1", "test/top1"),
        "error": ("eval/error", "test/error"),
    },
}
"""Columns of the console's table for each clock, and patterns of what they show: the first value that a record has."""

WIDTH = 13  # of a column
LEAST_SECONDS, LEAST_OF_ALL = 3.0, 0.05
"""Time between two lines: at least so long, and this share of the time so far; 20 lines a minute, 100 in an hour."""


class ConsoleSink(Sink):
    """Prints lines of values through Python's `logger`, below the names of their columns; all with `log_detail=full`.

    Records that follow within a short time share a line; the last one of a stage has one. Win rate, return and length
    are those of a test, or of training where nothing is tested.
    """

    name = "console"

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._columns: dict[str, tuple[str, ...]] = {}
        self._tested: set[str] = set()  # stages
        self._held: Record | None = None  # not printed so far
        self._began, self._printed = math.inf, -math.inf

    def _log(self, record: Record) -> None:
        config = self.facts.config
        if config.get("log_detail") == "full" or config.get("evaluate"):
            self.logger.info("%s", render_block(record, self.facts))
            return
        held, now = self._held, time.monotonic()
        if held is not None and held.stage == record.stage:
            record = replace(record, values={**held.values, **record.values})
        elif held is not None:
            self._line(held)
        self._held, self._began = record, min(self._began, now)
        rest = max(LEAST_SECONDS, LEAST_OF_ALL * (now - self._began)) - (now - self._printed)
        if rest <= 0 or record.t >= self.facts.totals.get(record.clock, math.inf):
            self._printed = now
            self._line(record)

    def _close(self, exit_state: str) -> None:
        if self._held is not None:
            self._line(self._held)

    def _line(self, record: Record) -> None:
        self._held, config, values = None, self.facts.config, record.values.items()
        if any(name.startswith("test_") for name in record.values):
            self._tested.add(record.stage)
        shown = {}
        for name, keys in COLUMNS[record.clock].items():
            only_tests = keys[0].startswith("test_") and record.stage in self._tested
            kinds = keys[:1] if only_tests else keys
            shown[name] = next((value for key in kinds for found, value in values if fnmatchcase(found, key)), None)
        if all(value is None for value in shown.values()):
            return
        # These come with the first update.
        later = {"loss", "epsilon"} if config.get("action_selector") == "epsilon_greedy" else {"loss"}
        old = self._columns.get(record.stage, ())
        names = tuple(name for name, value in shown.items() if value is not None or name in {*old, *later})
        if names != old:
            self._columns[record.stage] = names
            end = ("left",) * (record.clock == "t_env")
            self._print((record.stage if config.get("use_graph_reconstruction") else "steps", *names, *end))
        texts = ["-" if (value := shown[name]) is None else _short(value) for name in names]
        left = [_left(record, self.facts) or "-"] * (record.clock == "t_env")
        self._print((f"{record.t:,}", *texts, *left))

    def _print(self, cells: Iterable[str]) -> None:
        self.logger.info("%s", "".join(f"{cell:>{WIDTH}}" for cell in cells))


def _left(record: Record, facts: RunFacts) -> str:
    """Return the time to the end of training at the speed since the last record; empty where nothing says it."""
    speed, episodes = record.values.get("steps_per_second", 0.0), record.values.get("episode")
    end = facts.totals.get("t_env", 0.0)
    if not end and episodes:  # `max_episodes` ends it: at the mean length of the episodes so far
        end = record.t * facts.totals.get("episode", 0) / episodes
    # Before the first update a run only plays, faster than later.
    known = speed > 0 and end > 0 and record.values.get("updates") != 0
    return duration(max(0.0, end - record.t) / speed) if known else ""


def _short(value: float) -> str:
    """Return a number with three digits, and those before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def render_block(record: Record, facts: RunFacts) -> str:
    """Return a headline, then the values in aligned columns, sorted by name, test results first.

    Values of one type of node (`…_ally`), feature (`…_ally_f3`) or age (`…_age1`) are only in the files. Shares of the
    wall time, values of single maps and those of single ranks have lines of their own.
    """
    head = ["Recent Stats", f"{record.clock}: {_progress(record.t, facts.totals.get(record.clock))}"]
    if "episode" in record.values:
        head.append(f"Episode: {_progress(int(record.values['episode']), facts.totals.get('episode'))}")
    if record.clock == "t_env" and (left := _left(record, facts)):
        head.append(f"left: {left}")
    single = facts.config and not facts.config.get("use_graph_reconstruction")
    head.append(" · ".join(part for part in ("" if single else record.stage, facts.label) if part))
    apart = {name for name in record.values if name.startswith(PHASE) or RANK.match(name) or OF_MAP.match(name)}
    shown = [name for name in record.values if name not in {*HEADLINE, *apart} and not DETAIL.search(name)]
    names = sorted(shown, key=lambda name: (not name.startswith("test_"), name))
    width = shutil.get_terminal_size((120, 24)).columns
    name_width = max([NAME_WIDTH, *map(len, names)])
    cell = name_width + VALUE_WIDTH
    columns = max(1, min(4, (width + GAP - 2) // (cell + GAP)))
    rows = math.ceil(len(names) / columns)
    lines = [" | ".join(head)]
    for row in range(rows):  # column by column, so that similar names stay together
        cells = (f"{name:<{name_width}}{number_text(record.values[name]):>{VALUE_WIDTH}}" for name in names[row::rows])
        lines.append("  " + (" " * GAP).join(cells))
    return "\n".join([*lines, *_separate_lines(record.values)])


def _progress(at: int, total: int | None) -> str:
    return f"{at:,}" + (f" / {total:,}" if total else "")


def _separate_lines(values: dict[str, float]) -> list[str]:
    """Return the line of time shares, largest first, and lines of values that maps or ranks report separately."""
    phases = {name.removeprefix(PHASE): value for name, value in values.items() if name.startswith(PHASE)}
    largest = sorted(phases.items(), key=lambda item: -item[1])
    parts = " · ".join(f"{name} {100 * share:.1f} %" for name, share in largest if share >= LEAST_SHARE)
    lines: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        if found := OF_MAP.match(name):
            lines.setdefault(f"{found[1]} {found[3]} by map", {})[found[2]] = f"{value:.3g}"
        elif found := RANK.match(name):
            lines.setdefault(f"{found[1]} by rank", {})[found[2]] = f"{value:.4g}"
    apart = []
    for title, each in lines.items():
        names = sorted(each, key=lambda name: (len(name), name))  # 3m before 10m
        apart.append(f"  {title}: {', '.join(f'{name} {each[name]}' for name in names)}")
    return [*apart, *[f"  time   {parts}"] * bool(phases)]
