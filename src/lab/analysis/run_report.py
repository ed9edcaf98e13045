"""What a report says about one run: results, curves, reconstruction, codes, times, ranks, battles, warnings."""

from __future__ import annotations

import base64
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omagd.config.loading import base_values, config_names
from omagd.lab.analysis.charts import Chart, run_chart
from omagd.lab.analysis.groups import LABELLED, flattened, frozen
from omagd.lab.analysis.runs import Run, read_records
from omagd.run.reporting.card import NO_EFFECT, recorded_of, resumed
from omagd.run.reporting.plots import PANELS, panels_of_maps
from omagd.run.reporting.report import SHOWN, number_text
from omagd.utils.errors import UserError, readable
from omagd.utils.logging import duration
from omagd.utils.run_folder import RunFolder
from omagd.utils.storage import is_number

STAGES = {"stage1": "Stage 1: tokenizer", "stage2": "Stage 2: predictor", "stage3": "Stage 3: policy"}
COUNTS = {
    "skipped_updates": "updates skipped: their gradient was not finite",
    "updates_without_groups": "updates skipped: no rank had a group",
    "lost_episodes": "episodes lost: their game or process died",
    "restarts": "games started again",
    "worker_restarts": "environment workers replaced",
}
"""Failures that `metrics.jsonl` counts since the start of the run."""

GUESSES = {
    "predictor": "reconstruction", "ridge": "ridge regression", "map_constant": "map constant",
    "last_seen_or_mean": "last seen, else mean", "last_seen": "last seen", "slot_mean": "mean of the node",
    "zeros": "zeros",
}  # fmt: skip
"""Predictor and baselines of a table of beliefs."""

POPULATIONS = {
    "": "all", "ally": "allies", "enemy": "enemies", "never": "never seen", "before": "seen before",
    "age1": "1 step ago", "age2_3": "2-3", "age4_7": "4-7", "age8_15": "8-15", "age16": "16 and more",
}  # fmt: skip
"""Rows of a table of beliefs that the page shows, as columns."""

SHARES = {
    "top1": "token right", "top3": "token among the 3 most probable", "top5": "token among the 5 most probable",
    "taken_for_dead": "living units taken for dead", "recall_dead": "dead units found dead",
    "taken_for_dead_before": "living units taken for dead, of those seen before",
    "dead_ece": "expected calibration error of the probability of being dead",
}  # fmt: skip
LOG_LINES = 12
LARGEST_PICTURE, LARGEST_RECORDING = 1 << 20, 3 << 19
"""Bytes of one picture or recording that is put into a page."""

SLOWEST_SHARE = 0.005
Table = list[list[str]]


def values_of(run: Run, stage: str) -> dict[str, float]:
    """Return the results of a stage: those of the summary, else the last logged ones with stage 3's best tests."""
    entry = stages_of(run).get(stage, {})
    if values := {key: value for key, value in entry.get("values", {}).items() if is_number(value)}:
        return values
    found: dict[str, float] = {}
    for record in run.records:
        if record.get("stage") == stage:
            found |= {
                key.removeprefix("eval/").replace("policy/", "policy_"): v for key, v in record.items() if is_number(v)
            }
    for name in ("test_battle_won_mean", "test_return_mean") if stage == "stage3" else ():
        curve = run.test_curve(name)[2]
        found |= {f"best_{name}": float(curve.max())} if len(curve) else {}
    return found


def stages_of(run: Run) -> dict[str, dict[str, Any]]:
    """Return the stages of the summary."""
    return dict(run.summary.get("stages", {}))


def charts_by_stage(run: Run) -> list[tuple[str, list[Chart]]]:
    """Return the charts of each stage that has logged something; an evaluation has one value of each, no curves."""
    if run.kind == "evaluation":
        return []
    found: dict[str, list[Chart]] = {}
    held_out = [name for name, out in run.maps.items() if out]
    for panel in (*PANELS, *panels_of_maps(run.records, held_out)):
        if (each := run_chart(panel, run.records)) is not None:
            found.setdefault(panel.stage, []).append(each)
    return [(STAGES[stage], found[stage]) for stage in sorted(found, reverse=True)]


def results(run: Run) -> list[tuple[str, list[str], Table]]:
    """Return a table for each stage, the last one first: its head, and rows of a value, the last and the best one.

    An evaluation has one value of each.
    """
    tables = []
    head = ["", "value"] if run.kind == "evaluation" else ["", "last", "best"]
    for stage in reversed(STAGES):
        values = values_of(run, stage)
        rows = [
            [label, number_text(values[key]), number_text(values[f"best_{key}"]) if f"best_{key}" in values else ""]
            for key, label in SHOWN.items()
            if key in values
        ]
        tables += [(STAGES[stage], head, [row[: len(head)] for row in rows])] if rows else []
    return tables


def reconstruction(run: Run) -> list[dict[str, Any]]:
    """Return tables of errors on living unseen units and of right guesses: test episodes, and the trained policy's."""
    tables = []
    for stage, prefix, title in (
        ("stage2", "test_", "Test episodes"), ("stage3", "policy_", "Episodes of the trained policy"),
    ):  # fmt: skip
        values, found = values_of(run, stage), stages_of(run).get(stage, {}).get("beliefs")
        rows = found.get("rows", []) if isinstance(found, dict) else []
        rows = {row.get("row"): row for row in rows if isinstance(row, dict) and isinstance(row.get("mse"), dict)}
        shown = {name: label for name, label in POPULATIONS.items() if name in rows}
        if not shown:
            continue
        errors = [[label, *(_text(rows[name]["mse"], guess) for name in shown)] for guess, label in GUESSES.items()]
        errors.append(["units", *(_text(rows[name], "count") for name in shown)])
        shares = [[label, _text(values, prefix + key)] for key, label in SHARES.items() if prefix + key in values]
        ratios = [_text(values, f"{prefix}ratio_{name}") for name in ("simple", "ridge")]
        tables.append(
            {"title": title, "head": ["", *shown.values()], "errors": errors, "shares": shares, "ratios": ratios}
        )
    return tables


def codebook(run: Run) -> Table:
    """Return how many codes the tokenizer uses, and what it loses."""
    values, tokenizer = values_of(run, "stage1"), run.config.get("tokenizer_config")
    if "codes_in_use" not in values:
        return []
    total = tokenizer.get("n_codes") if isinstance(tokenizer, dict) else None
    share = f" ({values['codes_in_use'] / total:.0%})" if is_number(total) and total else ""
    rows = [["codes in use", f"{number_text(values['codes_in_use'])} of {total}{share}"]]
    labels = {"perplexity": "effective number of codes (perplexity)", "mse": "squared error of a node's features",
              "mse_self": "… of the agent itself", "mse_ally": "… of allies", "mse_enemy": "… of enemies",
              "cosine": "cosine similarity of a node and its decoding"}  # fmt: skip
    return rows + [[label, _text(values, key)] for key, label in labels.items() if key in values]


def seconds_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase of a stage in a summary, and their sum `wall`."""
    found = entry.get("phases")
    return {name: s for name, s in found.items() if is_number(s) and s >= 0} if isinstance(found, dict) else {}


def logged_starts(run: Run, stage: str) -> list[dict[str, float]]:
    """Return the seconds of each phase up to the last record of a stage, and `wall`, for each start that has a record.

    A record has the shares of the time since the record before; the first one of a start has some time in `prepare`.
    """
    clock = stages_of(run).get(stage, {}).get("clock")
    epochs, updates = (clock.get(key) if isinstance(clock, dict) else None for key in ("epoch", "updates"))
    per_epoch = updates / epochs if is_number(updates) and is_number(epochs) and epochs else 0.0
    starts: list[dict[str, float]] = []
    before: dict[str, Any] = {}
    for record in run.records:
        shares = {name: value for name, value in record.items() if name.startswith("time/") and is_number(value)}
        if record.get("stage") == stage and shares:
            if shares.get("time/prepare") or not starts:
                starts.append({})
            passed, before = _passed(before, record, per_epoch), record
            seconds = {name.removeprefix("time/"): share * passed for name, share in shares.items()}
            starts[-1] = _sums([starts[-1], {"wall": passed, **seconds}])
    return starts


def _passed(before: Mapping[str, Any], record: Mapping[str, Any], per_epoch: float) -> float:
    """Return the seconds between two records: by the clock of stage 3, else from the updates and their speed."""
    key = "wall_seconds" if "wall_seconds" in record else "epoch"

    def number(of: Mapping[str, Any], name: str) -> float:
        return float(of[name]) if is_number(of.get(name)) else 0.0

    now, last, speed = number(record, key), number(before, key), number(record, "updates_per_second")
    passed = now - last if now >= last else now  # a stage that begins again with weights has a new clock
    return passed if key == "wall_seconds" else passed * per_epoch / speed if speed else 0.0


def phase_seconds(run: Run) -> dict[str, dict[str, float]]:
    """Return the seconds of each phase of each stage over all starts of the run, and their sum `wall`.

    The summary has those since the last start; the records add the starts before, up to their last record. Of a stage
    that has not ended there are only records.
    """
    found = {}
    for stage in dict.fromkeys([*STAGES, *stages_of(run)]):
        last, starts = seconds_of(stages_of(run).get(stage, {})), logged_starts(run, stage)
        total = _sums([last, *starts[: -1 if last else None]])
        if total.get("wall"):
            found[stage] = total
    return found


def _sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def time_note(runs: Sequence[Run]) -> str:
    """Return which part of resumed runs the times cover; empty if no run was resumed."""
    again = [run for run in runs if run.summary.get("restarts") or resumed(run.card)]
    if not again:
        return ""
    if any(len(logged_starts(run, stage)) > 1 for run in again for stage in STAGES):
        return "All starts together; those before the last one count up to their last record in metrics.jsonl."
    return "An interrupted stage counts since its last start alone: metrics.jsonl has no times of earlier ones."


def phases(run: Run) -> list[dict[str, Any]]:
    """Return the time of each stage by phase, the largest first."""
    found = []
    for stage, seconds in phase_seconds(run).items():
        wall = seconds.pop("wall", 0.0)
        if wall > 0:
            ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
            parts = [(name, duration(s), 100 * s / wall) for name, s in ordered if s / wall >= SLOWEST_SHARE]
            found.append({"title": STAGES.get(stage, stage), "wall": duration(wall), "parts": parts})
    return found


def ranks(run: Run) -> Table:
    """Return a row for each rank: its training episodes, and what it logged of its own; the head first."""
    logs = {int(path.stem.removeprefix("rank_")): path for path in RunFolder(run.folder).episode_logs()}
    own = _own_values(run)
    numbers = sorted({*logs, *(rank for each in own.values() for rank in each)})
    rows = []
    for rank in numbers:
        count, steps, recent = 0, 0, deque[dict[str, Any]](maxlen=100)
        for episode in read_records(logs[rank]) if rank in logs else ():
            count, steps = count + 1, steps + (episode["length"] if is_number(episode.get("length")) else 0)
            recent.append(episode)
        ends = [_mean_text(recent, name) for name in ("return", "battle_won")]
        rows.append([str(rank), f"{count:,}", f"{steps:,}", *ends, *(_text(each, rank) for each in own.values())])
    head = ["rank", "episodes", "steps", "return, last 100", "won, last 100", *own]
    return [head, *rows] if rows else []


def _own_values(run: Run) -> dict[str, dict[int, float]]:
    """Return what each rank logged of its own, by name and rank: the highest peak, else the last value.

    A resumed run may have fewer ranks: a rank that the last record lacks has no value there.
    """
    own: dict[str, dict[int, float]] = {}
    for record in run.records:
        found: dict[str, dict[int, float]] = {}
        for name, value in record.items():
            if (match := re.fullmatch(r"(.+)_rank(\d+)", name)) and is_number(value):
                found.setdefault(match[1], {})[int(match[2])] = value
        for name, values in found.items():
            peaks = own.get(name, {}) if "peak" in name else {}
            own[name] = peaks | {rank: max(value, peaks.get(rank, value)) for rank, value in values.items()}
    return own


def rank_note(run: Run) -> str:
    """Return which part of a resumed run the table of ranks covers; empty if it was not resumed."""
    if not (run.summary.get("restarts") or resumed(run.card)):
        return ""
    return "Episodes, steps and peaks are those of all starts; other values are the last ones logged."


def warnings_of(run: Run) -> list[str]:
    """Return everything about a run that a reader of its results should know, one line each."""
    lines = []
    if run.state != "completed":
        lines.append(f"the run is {run.state}")
    if is_number(run.summary.get("restarts")) and run.summary["restarts"]:
        lines.append(f"all ranks were started again {number_text(run.summary['restarts'])} times")
    for entry in resumed(run.card):
        lost = f", {entry['lost_episodes']} episodes lost" if entry.get("lost_episodes") else ""
        kept = f"; what was written later is in {entry['set_aside']}" if entry.get("set_aside") else ""
        where = f"{entry.get('from')} at {entry.get('t_env')} steps"
        lines.append(f"resumed ({entry.get('kind')}) {entry.get('date', '')} from {where}{lost}{kept}")
    for name, words in COUNTS.items():
        counts = [record[name] for record in run.records if is_number(record.get(name))]
        if counts and max(counts):
            lines.append(f"{max(counts):g} {words}")
    if any((run.folder / "set_aside").glob("*")) and not any("set_aside" in line for line in lines):
        lines.append("set_aside/ has files of an earlier start that this run does not use")
    if not run.config:
        lines.append("config.json cannot be read")
    if not any(is_number(record.get(clock)) for record in run.records for clock in ("t_env", "epoch")):
        lines.append("metrics.jsonl has no record that can be read")
    return [readable(line) for line in lines]


def log_lines(run: Run) -> list[str]:
    """Return the last warnings and errors in the text logs of the ranks, each kind once."""
    found: dict[str, str] = {}
    for path in sorted((run.folder / "logs").glob("rank_*.log")):
        if not path.is_file():
            continue
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if match := re.match(r"\S+ (\S+) (WARNING|ERROR|CRITICAL) \S+ (.*)", line):
                    found.setdefault(match[3], readable(f"{path.stem.replace('_', ' ')}, {match[1][:8]}: {match[3]}"))
    return [line[:400] for line in list(found.values())[-LOG_LINES:]]


def preset_differences(run: Run) -> tuple[str, Table]:
    """Return the preset of a run, and rows of key, value there, value here, without what changes no result."""
    name = run.name if run.name in config_names("algs") else None
    env = run.env if run.env in config_names("envs") else None
    try:
        preset = flattened(base_values(name, env))
    except UserError:
        return "", []
    known = "env_args.map_name", "env_args.difficulty"
    here = {key: value for key, value in flattened(run.config).items() if key.partition(".")[0] not in NO_EFFECT}
    rows = [
        [key, _value(preset[key]) if key in preset else "default", _value(value)]
        for key, value in here.items()
        if key not in LABELLED - {"seed"} and (key in preset or key in known)
        and frozen(preset.get(key)) != frozen(value)
    ]  # fmt: skip
    return f"--config={name or 'default'}" + (f" --env-config={env}" if env else ""), rows


def card_rows(run: Run) -> Table:
    """Return the entries of the card: what must be equal, then what may differ and what made the run."""
    card = run.card
    if not card:
        return []
    recorded = recorded_of(card)
    rows = [["id", str(card["id"])], ["method", str(card.get("method", "-"))]]
    rows += [[key, _value(value)] for key, value in card["compared"].items()]
    made_by = run.summary.get("made_by")
    kept = {**recorded, **(recorded.get("versions") or {}), **(card.get("reached") or {})}
    kept |= made_by if isinstance(made_by, dict) else {}
    return rows + [[key, _value(value)] for key, value in kept.items() if not isinstance(value, dict)]


def configuration(run: Run) -> Table:
    """Return all keys and values."""
    return [[key, _value(value)] for key, value in sorted(flattened(run.config).items())]


def pictures(run: Run) -> list[tuple[str, str]]:
    """Return the pictures of battles and of an evaluation: caption and data URI."""
    captions = {"beliefs": "One moment of a battle of the trained team: as one agent sees it, as it is reconstructed,"
                " and as it was", "beliefs_stage2": "The same for a held-out episode, after stage 2",
                "evaluation": "Return and length of the episodes of this evaluation"}  # fmt: skip
    found = []
    for name, caption in captions.items():
        path = RunFolder(run.folder).plots / f"{name}.png"
        if path.is_file() and path.stat().st_size <= LARGEST_PICTURE:
            found.append((caption, "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()))
    return found


def player(run: Run) -> tuple[str, str]:
    """Return the page that plays the newest recorded battle of a run, and a warning if it cannot be read."""
    from omagd.run.recording.recording import SUFFIX

    replays = RunFolder(run.folder).replays
    found = [path for path in replays.glob(f"*{SUFFIX}") if path.is_file()]
    fits = [path for path in found if path.stat().st_size <= LARGEST_RECORDING]
    if not fits:
        return "", f"{len(found)} recordings are too large for this page: see replays/" if found else ""
    from omagd.lab.watch.page import player_page
    from omagd.run.recording.recording import Recording

    newest = max(fits, key=lambda path: path.stat().st_mtime)
    try:
        return player_page(Recording.read(newest)), ""
    except UserError as problem:
        return "", problem.message


def _text(values: Mapping[Any, Any], key: Any) -> str:
    return number_text(values[key] if is_number(values.get(key)) else None)


def _mean_text(episodes: Sequence[Mapping[str, Any]], name: str) -> str:
    known = [float(episode[name]) for episode in episodes if is_number(episode.get(name))]
    return number_text(sum(known) / len(known)) if known else "-"


def _value(value: Any) -> str:
    text = "-" if value is None or value == "" else f"{value:g}" if isinstance(value, float) else str(value)
    return readable(text)


def saved_files(run: Run) -> list[str]:
    """Return what the folder of the run holds, at the top; nothing of a run that a results file describes."""
    names: list[Path] = sorted(run.folder.iterdir()) if run.folder.is_dir() else []
    return [readable(path.name) + "/" * path.is_dir() for path in names if not path.name.startswith((".", "lock"))]
