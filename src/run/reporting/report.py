"""Summaries: `summary.json`, the text at the end of a run, and tables over seeds and runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from omagd.config.loading import config_names, read_preset
from omagd.run.reporting.card import Card, is_card, marks, resumed
from omagd.utils.errors import UserError
from omagd.utils.logging import duration
from omagd.utils.run_folder import RunFolder, keep_json
from omagd.utils.storage import is_number, read_entry

HEADLINES = {
    "win_rate": "test_battle_won_mean",
    "best_win_rate": "best_test_battle_won_mean",
    "return": "test_return_mean",
    "best_return": "best_test_return_mean",
}
"""Headline numbers of the summary, and the stage 3 values that they repeat."""

SHOWN = {
    "graph_loss": "loss",
    "mse": "MSE",
    "codes_in_use": "codes in use",
    "top1": "top-1 accuracy",
    "test_balanced_accuracy": "dead or alive",
    "test_error": "error on living unseen units",
    "test_ratio_simple": "relative to the best simple baseline",
    "test_ratio_ridge": "to ridge regression",
    "test_battle_won_mean": "win rate",
    "test_return_mean": "return",
    "test_ep_length_mean": "episode length",
    "lost_episodes": "lost episodes",
    "restarts": "games restarted",
    "worker_restarts": "workers restarted",
    "policy_error": "belief error",
    "policy_ratio_simple": "relative to the best simple baseline",
    "policy_ratio_ridge": "to ridge regression",
    "policy_balanced_accuracy": "dead or alive",
}
"""Values of a stage that the closing text shows, with their labels."""

LEAST_SHARE = 0.01
"""Phases with a smaller share in every stage are left out of the closing text."""

Summary = Mapping[str, Any]


def write_summary(folder: RunFolder, values: dict[str, Any]) -> Path:
    """Add the headline numbers, the total of updates and the artifacts to `values`; write `summary.json`.

    The statistics of maps, which stage 3 keeps, become the entry `tasks`.

    values: facts and results of the run, with `stages`: {name: {clock, values, files}}. Changed in place.
    """
    results = values.get("stages", {}).get("stage3", {}).get("values", {})
    for headline, name in HEADLINES.items():
        values.setdefault(headline, results.get(name))
    if tasks := values.get("stages", {}).get("stage3", {}).pop("tasks", None):
        values["tasks"] = tasks
    clocks = [stage.get("clock", {}) for stage in values.get("stages", {}).values()]
    values["updates"] = sum(clock.get("updates", 0) for clock in clocks)
    values["artifacts"] = {**folder.artifacts(), "summary": str(folder.summary_json)}
    keep_json(folder.summary_json, values)
    return folder.summary_json


def render_summary(summary: Summary) -> str:
    """Return the closing text: results, files, and the next command."""
    lines = ["", "─" * 78, _headline(summary)]
    lines += [f"  {name}   {_reached(stage)}" for name, stage in summary.get("stages", {}).items()]
    lines += [f"  held out {held_out}"] if (held_out := _held_out(summary)) else []
    lines += phases_table(summary)
    folder = Path(summary["folder"])
    lines.append(f"Files   {folder}")
    for label, path in _files(summary):
        lines.append(f"  {label:<9}{Path(path).relative_to(folder) if Path(path).is_relative_to(folder) else path}")
    if command := next_command(summary):
        lines.append(f"Next    {command}")
    return "\n".join([*lines, "─" * 78])


def phases_table(summary: Summary) -> list[str]:
    """Return a row of time for each stage: its duration, then the shares of its phases."""
    measured = {name: stage["phases"] for name, stage in summary.get("stages", {}).items() if stage.get("phases")}
    names = list(dict.fromkeys(phase for seconds in measured.values() for phase in seconds if phase != "wall"))
    names = [name for name in names if any(_share(seconds, name) >= LEAST_SHARE for seconds in measured.values())]
    if not names:
        return []
    names.sort(key=lambda name: -sum(seconds.get(name, 0.0) for seconds in measured.values()))
    again = summary.get("restarts") or resumed(_card(summary))
    rows = [["Time since the last start" if again else "Time", "wall", *names]]
    for stage, seconds in measured.items():
        shares = [_share(seconds, name) for name in names]
        cells = [f"{100 * share:.1f} %" if share >= LEAST_SHARE / 10 else "-" for share in shares]
        rows.append([f"  {stage}", duration(seconds["wall"]), *cells])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with their cells below each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _share(seconds: Mapping[str, float], name: str) -> float:
    return seconds.get(name, 0.0) / max(seconds["wall"], 1e-9)


def next_command(summary: Summary) -> str:
    """Return the command for the next step, or an empty string."""
    stages = summary.get("stages", {})
    if summary.get("exit_state") != "completed" or not stages:
        return ""
    if "stage3" in stages:
        saved = stages["stage3"].get("files", {}).get("agent") and summary.get("kind") != "evaluation"
        return f"python -m omagd evaluate {shlex.quote(str(summary['folder']))}" if saved else ""
    given = read_entry(RunFolder(summary["folder"]).config_json).get("pretrained_tokenizer_path")
    tokenizer = stages.get("stage1", {}).get("files", {}).get("stage1") or given
    paths = f" pretrained_tokenizer_path={shlex.quote(str(tokenizer))}" if tokenizer else ""
    if "stage2" not in stages:
        return f"{_base_command(summary)} reconstructer_stage=stage2{paths}" if paths else ""
    predictor = stages["stage2"].get("files", {}).get("stage2")
    if not predictor:
        return ""
    base = _base_command(summary)
    return f"{base} reconstructer_stage=stage3{paths} pretrained_mask_predictor_path={shlex.quote(str(predictor))}"


def seeds_table(results: Sequence[Summary]) -> str:
    """Return a table of several seeds: a row for each, then median, interquartile range and extremes."""
    first = results[0]
    title = f"{first['env']} {first.get('map_name', '')} · {first['name']} · {len(results)} seeds"
    (head, *rows), notes = _rows(results, [str(summary["seed"]) for summary in results], "seed")
    columns = [[stage_value(summary, *column) for summary in results] for column in value_columns(results)]
    spread = [[number for number in column if number is not None] for column in columns]
    for label, percentiles in (("median", [50]), ("quartiles", [25, 75]), ("min-max", [0, 100])):
        cells = ["-".join(number_text(float(n)) for n in np.percentile(c, percentiles)) if c else "-" for c in spread]
        rows.append([label, *cells, "", ""])
    lines = aligned([head, *rows])
    rule = "─" * max(map(len, lines))
    return "\n".join(["", title, rule, lines[0], rule, *lines[1:-3], rule, *lines[-3:], rule, *notes])


def _rows(results: Sequence[Summary], labels: Sequence[str], title: str) -> tuple[list[list[str]], list[str]]:
    """Return the head and a row for each run, and the footnotes on rows that are not comparable."""
    asterisks, notes = marks([_card(summary) for summary in results], [f"{title} {label}" for label in labels])
    columns = value_columns(results)
    heads = [value_head(key) for _, key in columns]
    rows = [[title, *heads, "time", "state"]]
    for summary, label, mark in zip(results, labels, asterisks, strict=True):
        numbers = [number_text(stage_value(summary, *column)) for column in columns]
        seconds = summary.get("wall_seconds")
        time = duration(seconds) if seconds is not None else "-"
        rows.append([label + mark, *numbers, time, str(summary.get("exit_state", "unknown"))])
    return rows, notes


def _card(summary: Summary) -> Card | None:
    card = summary.get("card")
    return card if is_card(card) else None


def _headline(summary: Summary) -> str:
    ranks = summary.get("world_size", 1)
    parts = [
        f"{summary['env']} {summary.get('map_name', '')}".strip(),
        str(summary["name"]),
        *(["evaluation"] if summary.get("kind") == "evaluation" else []),
        f"seed {summary['seed']}",
        f"{ranks} rank{'s' if ranks != 1 else ''}, {summary.get('environments', ranks)} environments",
        duration(summary.get("wall_seconds", 0.0)),
        str(summary.get("exit_state", "unknown")),
    ]
    return " · ".join(parts)


def _reached(stage: Mapping[str, Any]) -> str:
    """Return one line on a stage: steps or epochs, then the values, each with its best."""
    clock, values = stage.get("clock", {}), stage.get("values", {})
    names = {"epoch": "epochs"} if not clock.get("t_env") else {"t_env": "steps", "episodes": "episodes"}
    ran = ", ".join(f"{clock[key]:,} {unit}" for key, unit in names.items() if clock.get(key))
    shown = []
    for key, label in SHOWN.items():
        if values.get(key) is None:
            continue
        best = values.get(f"best_{key}")
        shown.append(
            f"{label} {number_text(values[key])}" + (f" (best {number_text(best)})" if best is not None else "")
        )
    return " | ".join(part for part in (ran, ", ".join(shown)) if part)


def _held_out(summary: Summary) -> str:
    """Return one line on the maps of a set that were not trained on: means, then the maps; empty without them."""
    card = _card(summary)
    maps = str(card["compared"].get("held_out_maps") or "").split() if card else []
    values = summary.get("stages", {}).get("stage3", {}).get("values", {})
    key = next((key for key in ("battle_won_mean", "return_mean") if f"test_held_out_{key}" in values), None)
    if key is None:
        return ""
    each = [f"{name} {number_text(values[found])}" for name in maps if (found := f"test/{name}/{key}") in values]
    mean = f"{SHOWN[f'test_{key}']} {number_text(values[f'test_held_out_{key}'])}"
    return " | ".join(part for part in (mean, ", ".join(each)) if part)


def _files(summary: Summary) -> Iterable[tuple[str, str]]:
    """Yield the most useful files, as (label, path): pictures, weights, numbers."""
    artifacts = summary.get("artifacts", {})
    for name, path in artifacts.items():
        if name.startswith("plots/"):
            yield ("curves" if name.endswith("curves") else "picture"), path
    for name in ("model", "pretrain_stage2_best", "pretrain_stage1_best"):
        if name in artifacts:
            yield "weights", artifacts[name]
    yield from ((name, artifacts[name]) for name in ("replays", "metrics", "summary") if name in artifacts)


def _base_command(summary: Summary) -> str:
    """Return the start of a command that trains the same environment, with `--config` if it names a known file."""
    name = str(summary["name"])
    known = name in config_names("algs")
    parts = ["python src/main.py", f"--config={name}" if known else "", f"--env-config={_env_config(summary)} with"]
    if summary.get("map_name"):
        parts.append(f"env_args.map_name={summary['map_name']}")
    if summary.get("world_size", 1) > 1:
        parts.append(f"run=ddp world_size={summary['world_size']}")
    return " ".join(part for part in parts if part)


def _env_config(summary: Summary) -> str:
    """Return the name of the environment's file: its own name, else the file with its map."""
    name, names = str(summary["env"]), config_names("envs")
    wanted = (name, summary.get("map_name") or "")
    for each in [] if name in names else names:
        with suppress(UserError):  # of a plug-in, broken
            file = read_preset("envs", each)
            if (file.get("env"), file.get("env_args", {}).get("map_name") or "") == wanted:
                return each
    return name


def value_columns(results: Sequence[Summary]) -> list[tuple[str, str]]:
    """Return (stage, value) for each column: the values of the last stage that any run reached."""
    stage = max((name for summary in results for name in summary.get("stages", {})), default="")
    columns = [(stage, key) for known in SHOWN for key in (known, f"best_{known}")]
    return [column for column in columns if any(stage_value(summary, *column) is not None for summary in results)]


def value_head(key: str) -> str:
    """Return the label of a value, in tables."""
    return SHOWN.get(key) or f"best {SHOWN[key.removeprefix('best_')]}"


def stage_value(summary: Summary, stage: str, key: str) -> float | None:
    """Return a value of a stage, None if it is not there or not finite."""
    value = summary.get("stages", {}).get(stage, {}).get("values", {}).get(key)
    return float(value) if is_number(value) else None


def number_text(value: float | None) -> str:
    """Return a number with three significant digits or decimals; `-` for None."""
    if value is None:
        return "-"
    if float(value).is_integer() and abs(value) > 1:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.3f}"
