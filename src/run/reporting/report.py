"""Summaries: `summary.json`, and the text at the end of a run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omagd.run.reporting.card import recorded_of
from omagd.run.run_folder import RunFolder, keep_json, newest_run, read_entry
from omagd.utils.errors import UserError
from omagd.utils.logging import duration

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
    "test_error": "predictor error",
    "test_ratio_simple": "error over best simple guess",
    "test_ratio_ridge": "error over ridge regression",
    "test_battle_won_mean": "win rate",
    "test_return_mean": "return",
    "test_ep_length_mean": "episode length",
    "test_held_out_battle_won_mean": "win rate on held-out maps",
    "test_held_out_return_mean": "return on held-out maps",
    "lost_episodes": "lost episodes",
    "restarts": "games restarted",
    "worker_restarts": "workers restarted",
    "policy_error": "belief error",
    "policy_ratio_simple": "error over best simple guess",
    "policy_ratio_ridge": "error over ridge regression",
    "policy_balanced_accuracy": "dead or alive",
}
"""Values of a stage that the closing text and tables show, with their labels."""

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


def render_summary(summary: Summary, elapsed: float = 0.0) -> str:
    """Return the closing text: results, files, and the next commands. elapsed: seconds with the start-up, if known."""
    stages = summary.get("stages", {})
    single = list(stages) == ["stage3"] and not recorded_of(summary.get("card")).get("use_graph_reconstruction")
    only = str(summary.get("kind", "training")) if single else ""
    lines = ["", "─" * 78, _headline(summary, elapsed)]
    lines += [f"  {only or name}   {_reached(stage)}" for name, stage in stages.items()]
    lines.append(f"Files   {summary['folder']}")
    lines += [f"{'' if n else 'Next':<8}{step}" for n, step in enumerate(next_steps(summary))]
    return "\n".join([*lines, "─" * 78])


def next_steps(summary: Summary) -> list[str]:
    """Return what can be done with a run: keys of the next stage, or commands with what they are for."""
    stages, folder = summary.get("stages", {}), nearby(str(summary["folder"]))
    here, above = f" {shlex.quote(folder)}", shlex.quote(os.path.dirname(folder) or ".")
    with suppress(UserError):  # there is no run in results/
        here = "" if newest_run("report") == folder else here
    page = {f"report{here}": "curves, settings and times on one page"}
    if summary.get("kind") == "evaluation" or not stages:
        return []
    if summary.get("exit_state") != "completed":
        return _commands(page)
    if "stage3" in stages:
        saved = stages["stage3"].get("files", {}).get("agent")
        team = {f"watch{here}": "a battle in your browser", f"evaluate{here}": "more episodes"}
        return _commands((team if saved else {}) | page | {f"compare {above}": "this run beside the others there"})
    config = read_entry(RunFolder(summary["folder"]).config_json)
    if config.get("evaluation_only"):
        return _commands(page)
    given = config.get("pretrained_tokenizer_path")
    tokenizer = stages.get("stage1", {}).get("files", {}).get("stage1") or given
    predictor = stages.get("stage2", {}).get("files", {}).get("stage2")
    paths = {"pretrained_tokenizer_path": tokenizer, "pretrained_mask_predictor_path": predictor}
    words = [f"{key}={shlex.quote(str(path))}" for key, path in paths.items() if path]
    words += ["pretrain_only=False"] * bool(words and config.get("pretrain_only"))
    key = "recontructer_stage" if config.get("recontructer_stage") else "reconstructer_stage"  # both would be too many
    again = f"the same command with {key}={'stage3' if predictor else 'stage2'}"
    return [" ".join([again, *words])] * bool(words) + _commands(page)


def _commands(about: Mapping[str, str]) -> list[str]:
    width = max(map(len, about), default=0)
    return [f"{program()} {words:<{width}}   {text}" for words, text in about.items()]


def program() -> str:
    """Return how to call this program from here: by its name where that finds it, else through its interpreter."""
    found = shutil.which("omagd") == str(Path(sys.executable).with_name("omagd"))
    return "omagd" if found else f"{shlex.quote(nearby(sys.executable))} -m omagd"


def nearby(path: str) -> str:
    """Return a path below the current folder as it is typed there; others as they are."""
    return path.removeprefix(os.path.join(os.getcwd(), ""))


def _headline(summary: Summary, elapsed: float) -> str:
    ranks, seconds = summary.get("world_size", 1), summary.get("wall_seconds", 0.0)
    took, before = duration(seconds), elapsed - seconds
    if before >= 0.5 and not (summary.get("restarts") or (summary.get("card") or {}).get("resumed")):
        took = f"{duration(elapsed)} ({duration(before)} of them start-up)"  # else `seconds` has earlier starts in it
    parts = [
        f"{summary['env']} {summary.get('map_name', '')}".strip(),
        str(summary["name"]),
        *(["evaluation"] if summary.get("kind") == "evaluation" else []),
        f"seed {summary['seed']}",
        f"{ranks} rank{'s' if ranks != 1 else ''}, {summary.get('environments', ranks)} environments",
        took,
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
        # Stage 2 tests the model that it keeps; the other value is of the last one.
        if (value := values.get(f"test_{key}", values.get(key))) is None:
            continue
        best = values.get(f"best_{key}")
        shown.append(f"{label} {number_text(value)}" + (f" (best {number_text(best)})" if best is not None else ""))
    return " | ".join(part for part in (ran, ", ".join(shown)) if part)


def number_text(value: float | None) -> str:
    """Return a number with three significant digits or decimals; `-` for None."""
    if value is None:
        return "-"
    if float(value).is_integer() and abs(value) > 1:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.3f}"
