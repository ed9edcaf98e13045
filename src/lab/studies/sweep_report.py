"""What a sweep has found: tables of its trials, slice plots, the best preset, and its space as a W&B sweep file."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from omagd.config.loading import DEFAULT_CONFIG, read_preset, to_plain
from omagd.lab.studies.spec import config_of_words
from omagd.lab.studies.state import StudyState
from omagd.lab.studies.sweep_spec import Parameter, Sweep, trial_name
from omagd.lab.studies.trials import ENOUGH, ERROR, SEEDS, STRIDE, Trials
from omagd.run.reporting.plots import FAINT, GRID, INK, PALETTE
from omagd.utils.run_folder import write_json
from omagd.utils.writing import replace_file

COLUMNS = 3
MOST_TICKS = 4
MAP = "env_args.map_name"
STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}


def results_of(sweep: Sweep, trials: Trials, state: StudyState) -> dict[str, Any]:
    """Return the trials, the best one first, and what they say about the keys: the content of `trials.json`."""
    rows = []
    for trial in trials.all():
        runs = [record for record in state.records.values() if record.job.arm == trial_name(trial.number)]
        pruned = trial.state.name == "PRUNED"
        rows.append(
            {
                "trial": trial.number, "state": STATES[trial.state.name],
                "value": trial.values[0] if trial.values else None, "by_seed": trial.user_attrs.get(SEEDS, {}),
                "keys": dict(trial.params), "error": trial.user_attrs.get(ERROR, ""),
                "pruned_after_test": trial.last_step % STRIDE if pruned and trial.last_step is not None else None,
                "seconds": sum(record.seconds for record in runs), "runs": [record.job.name for record in runs],
            }
        )  # fmt: skip
    sign = -1 if sweep.file.direction == "maximize" else 1
    order = list(STATES.values())
    rows.sort(key=lambda row: (order.index(row["state"]), sign * (row["value"] or 0.0), row["trial"]))
    best = trials.best()
    file = sweep.file
    return {
        "sweep": sweep.folder.name, "metric": file.metric, "direction": file.direction, "over_tests": file.over_tests,
        "over_seeds": file.over_seeds, "seeds": list(sweep.seeds), "best": None if best is None else best.number,
        "importances": trials.importances(), "trials": rows,
    }  # fmt: skip


def write_tables(sweep: Sweep, found: Mapping[str, Any]) -> None:
    """Write `trials.md`, `trials.csv`, `trials.json` and, once a trial is complete, `best.yaml`. Errors: OSError."""
    write_json(sweep.folder / "trials.json", found)
    replace_file(sweep.folder / "trials.csv", _csv(sweep, found).encode())
    replace_file(sweep.folder / "trials.md", markdown(sweep, found).encode())
    best = next((row for row in found["trials"] if row["trial"] == found["best"]), None)
    if best is not None:
        replace_file(sweep.folder / "best.yaml", preset(sweep, best).encode())


def markdown(sweep: Sweep, found: Mapping[str, Any]) -> str:
    """Return the trials as a Markdown table, above it the best one and the importances."""
    keys = [parameter.key for parameter in sweep.space]
    head = ["trial", found["metric"], *(f"seed {seed}" for seed in found["seeds"]), *keys, "state"]
    rows = []
    for row in found["trials"]:
        seeds = [_number(row["by_seed"].get(str(seed))) for seed in found["seeds"]]
        after = "" if row["pruned_after_test"] is None else f" at test {row['pruned_after_test']}"
        state = f"{row['state']}{after}" + (f": {row['error']}" if row["error"] else "")
        values = [_number(row["keys"].get(key)) for key in keys]
        rows.append([str(row["trial"]), _number(row["value"]), *seeds, *values, state.replace("|", "\\|")])
    file = sweep.file
    about = f"{len(found['trials'])} of {file.trials} trials; {file.over_seeds} over seeds of the {file.over_tests}"
    lines = [
        f"# {found['sweep']}",
        "",
        f"{about} {found['metric']} ({'more' if _more(sweep) else 'less'} is better).",
        "",
    ]
    if found["best"] is not None:
        lines += [f"Best: trial {found['best']}. Train with it: `--config={sweep.folder / 'best.yaml'}`.", ""]
    lines += [f"| key | importance{_few_trials(found)} |", "| --- | --- |"] if found["importances"] else []
    lines += [f"| {key} | {share:.2f} |" for key, share in found["importances"].items()]
    lines += [""] if found["importances"] else []
    lines += [_row(head), _row(["---"] * len(head)), *map(_row, rows)]
    return "\n".join(lines) + "\n"


def _few_trials(found: Mapping[str, Any]) -> str:
    """Return from how many trials the importances are, where those are few."""
    count = sum(row["value"] is not None and row["state"] in {"complete", "pruned"} for row in found["trials"])
    return f" ({count} trials)" if count < ENOUGH else ""


def _csv(sweep: Sweep, found: Mapping[str, Any]) -> str:
    keys = [parameter.key for parameter in sweep.space]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    seeds = [f"seed_{seed}" for seed in found["seeds"]]
    writer.writerow(["trial", "state", "value", *seeds, *keys, "seconds", "error"])
    for row in found["trials"]:
        by_seed = [row["by_seed"].get(str(seed)) for seed in found["seeds"]]
        values = [row["keys"].get(key) for key in keys]
        writer.writerow([row["trial"], row["state"], row["value"], *by_seed, *values, row["seconds"], row["error"]])
    return text.getvalue()


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _more(sweep: Sweep) -> bool:
    return sweep.file.direction == "maximize"


def preset(sweep: Sweep, best: Mapping[str, Any]) -> str:
    """Return the base configuration with the keys of a trial as YAML for `--config`. The map is left out."""
    options = dict(word.removeprefix("--").split("=", 1) for word in sweep.words if word.startswith("--"))
    given = [word.partition("=")[0] for word in sweep.words[sweep.words.index("with") + 1 :]]
    values = read_preset("algs", options.get("config", DEFAULT_CONFIG))
    words = sweep.jobs(best["trial"], best["keys"])[0].words
    found = to_plain(config_of_words(words))
    for key in dict.fromkeys([*given, *best["keys"]]):
        if key != MAP or key in best["keys"]:
            _put(values, key, _at(found, key))
    values["name"] = sweep.folder.name
    place = f"{sweep.config.env} {sweep.config.map_name}".strip()
    score = f"{sweep.file.metric} {_number(best['value'])} on {place}, {len(sweep.seeds)} seeds"
    head = f"# Trial {best['trial']} of the sweep {sweep.folder.name}: {score}.\n"
    searched = "".join(f"# searched: {key}\n" for key in best["keys"])
    return head + searched + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value


def write_pictures(sweep: Sweep, found: Mapping[str, Any]) -> Path | None:
    """Write `slices.png`: for each key, the value of each trial over the key. Errors: OSError."""
    rows = [row for row in found["trials"] if row["value"] is not None and row["state"] in {"complete", "pruned"}]
    if not rows:
        return None
    from matplotlib.figure import Figure

    columns = 2 if len(sweep.space) == 4 else min(COLUMNS, len(sweep.space))
    lines = math.ceil(len(sweep.space) / columns)
    figure = Figure(figsize=(3.6 * columns + 0.4, 2.9 * lines + 0.6), dpi=150, layout="constrained", facecolor="white")
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False)
    shares = found["importances"]
    order = sorted(sweep.space, key=lambda parameter: -shares.get(parameter.key, 0.0))
    for number, panel in enumerate(panels.flat):
        if number >= len(order):
            panel.set_visible(False)
            continue
        _slice(panel, order[number], rows, found["best"])
        share = shares.get(order[number].key)
        part = "" if share is None else f": importance {share:.0%}{_few_trials(found)}"
        panel.set_title(f"{order[number].key}{part}", fontsize=9, color=INK, loc="left")
        if number % columns == 0:
            panel.set_ylabel(found["metric"], fontsize=8, color=INK)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    path = sweep.folder / "slices.png"
    replace_file(path, picture.getvalue())
    return path


def _slice(panel: Any, parameter: Parameter, rows: Sequence[Mapping[str, Any]], best: int | None) -> None:
    """Draw one panel: complete trials, pruned ones at the value where they ended, and the best one."""
    from matplotlib.ticker import NullFormatter

    names = [str(value) for value in parameter.choices]
    groups = {
        "complete": ([r for r in rows if r["state"] == "complete" and r["trial"] != best], "o", PALETTE[0], 26),
        "pruned, where it ended": ([r for r in rows if r["state"] == "pruned"], "x", FAINT, 22),
        "best": ([r for r in rows if r["trial"] == best], "*", PALETTE[1], 120),
    }
    for label, (shown, marker, color, size) in groups.items():
        keys = [row["keys"][parameter.key] for row in shown]
        x = [names.index(str(key)) for key in keys] if names else keys
        panel.scatter(x, [row["value"] for row in shown], marker=marker, color=color, s=size, label=label, zorder=3)
    if names:
        panel.set_xticks(range(len(names)), names)
        panel.set_xlim(-0.5, len(names) - 0.5)
    elif parameter.log:
        panel.set_xscale("log")
        ticks = log_ticks(*panel.get_xlim())
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(color=GRID, linewidth=0.8, zorder=0)
    panel.tick_params(labelsize=8, colors=INK)
    panel.spines[["top", "right"]].set_visible(False)


def log_ticks(low: float, high: float) -> list[float]:
    """Return at most `MOST_TICKS` ticks of a logarithmic axis within its ends: else 1, 2, 5 of each, …"""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for digits in ((1,), (1, 2, 5), range(1, 10)):
        found = [float(f"{digit}e{power}") for power in powers for digit in digits]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= 2:
            break
    return found[:: math.ceil(len(found) / MOST_TICKS)] if found else [float(f"{math.sqrt(low * high):.3g}")]


def wandb_file(sweep: Sweep) -> str:
    """Return the space as a W&B sweep file: one run per seed, since W&B does not average over seeds."""
    goal = "maximize" if _more(sweep) else "minimize"
    values = {
        "program": "omagd",
        "command": ["python", "-m", "omagd", *sweep.words, "use_wandb=True", "${args_no_hyphens}"],
        "method": "bayes",
        "metric": {"name": sweep.file.metric, "goal": goal},
        "run_cap": sweep.file.trials * len(sweep.seeds),
        "parameters": {p.key: _wandb(p) for p in sweep.space} | {"seed": {"values": list(sweep.seeds)}},
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _wandb(parameter: Parameter) -> dict[str, Any]:
    low, high = parameter.low, parameter.high
    if parameter.kind == "choice":
        return {"values": list(parameter.choices)}
    if parameter.step is not None:  # W&B's steps are multiples of q, not low, low + q, …
        return {"values": [low + number * parameter.step for number in range(int(parameter.size))]}
    if parameter.kind == "int":
        kind = {"distribution": "q_log_uniform_values", "q": 1} if parameter.log else {"distribution": "int_uniform"}
    else:
        kind = {"distribution": "log_uniform_values" if parameter.log else "uniform"}
    return {**kind, "min": low, "max": high}
