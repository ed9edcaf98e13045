"""What a report says about one run: results, curves, reconstruction, times, battles, warnings."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from omagd.config.loading import base_values, config_names
from omagd.lab.analysis import run_curves
from omagd.lab.analysis.groups import LABELLED, frozen
from omagd.lab.analysis.run_curves import GUESSES
from omagd.lab.analysis.runs import Run, is_number
from omagd.run.reporting.card import NO_EFFECT, flattened, recorded_of, resumed
from omagd.run.reporting.report import SHOWN, number_text
from omagd.run.run_folder import RunFolder
from omagd.utils.errors import UserError, readable
from omagd.utils.logging import duration

STAGES = {"stage1": "Stage 1: tokenizer", "stage2": "Stage 2: predictor", "stage3": "Stage 3: policy"}
COUNTS = {
    "skipped_updates": "updates skipped: their gradient was not finite",
    "updates_without_groups": "updates skipped: no rank had a group",
    "lost_episodes": "episodes lost: their game or process died",
    "restarts": "games started again",
    "worker_restarts": "environment workers replaced",
}
"""Failures that `metrics.jsonl` counts since the start of the run."""

POPULATIONS = {
    "": "all", "ally": "allies", "enemy": "enemies", "never": "never seen", "before": "seen before",
    "age1": "1 step ago", "age2_3": "2-3", "age4_7": "4-7", "age8_15": "8-15", "age16": "16 and more",
}  # fmt: skip
"""Rows of a table of beliefs that the page shows, as columns."""

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
    """Return tables of errors on living unseen units: of test episodes, and of the trained policy's."""
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
        ratios = [_text(values, f"{prefix}ratio_{name}") for name in ("simple", "ridge")]
        tables.append({"title": title, "head": ["", *shown.values()], "errors": errors, "ratios": ratios})
    return tables


def curves_of(run: Run) -> list[tuple[str, str]]:
    """Return title and picture of the curves of a run, or of how the episodes of an evaluation ended."""
    if run.kind == "training":
        title, made = "Curves of all stages", run_curves.curves(run)
    else:
        title, made = "Return and length of the episodes of this evaluation", run_curves.evaluation(run)
    return [(title, data_uri(made, "png"))] if made is not None else []


def data_uri(content: bytes, form: str) -> str:
    """Return a picture as the address of an `img`. form: `png` or `svg+xml`."""
    return f"data:image/{form};base64,{base64.b64encode(content).decode()}"


def time_note(run: Run) -> str:
    """Return which part of a resumed run the times cover; empty if it was not resumed."""
    again = run.summary.get("restarts") or resumed(run.card)
    return "A stage that was interrupted counts since its last start." if again else ""


def phases(run: Run) -> list[tuple[str, str, Table]]:
    """Return for each stage its title, its time, and rows of a phase, its time and its share, the largest first."""
    found = []
    for stage, entry in stages_of(run).items():
        given = entry.get("phases", {})
        wall = given.get("wall", 0.0)
        ordered = sorted(((name, s) for name, s in given.items() if name != "wall"), key=lambda pair: -pair[1])
        rows = [[name, duration(s), f"{s / wall:.1%}"] for name, s in ordered if wall and s / wall >= SLOWEST_SHARE]
        found += [(STAGES.get(stage, stage), duration(wall), rows)] if rows else []
    return found


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


def pictures(run: Run) -> list[tuple[str, str]]:
    """Return the pictures of battles: caption and data URI."""
    captions = {"beliefs": "One moment of a battle of the trained team: as one agent sees it, as it is reconstructed,"
                " and as it was", "beliefs_stage2": "The same for a held-out episode, after stage 2"}  # fmt: skip
    found = []
    for name, caption in captions.items():
        path = RunFolder(run.folder).plots / f"{name}.png"
        if path.is_file() and path.stat().st_size <= LARGEST_PICTURE:
            found.append((caption, data_uri(path.read_bytes(), "png")))
    return found


def player(run: Run) -> tuple[str, str]:
    """Return the page that plays the newest recorded battle of a run, and a warning if it cannot be read."""
    from omagd.run.recording.recording import SUFFIX

    replays = RunFolder(run.folder).replays
    found = [path for path in replays.glob(f"*{SUFFIX}") if path.is_file()]
    fits = [path for path in found if path.stat().st_size <= LARGEST_RECORDING]
    if not fits:
        return "", f"{len(found)} recordings are too large for this page: see replays/" if found else ""
    from omagd.lab.watch.formats import player_page
    from omagd.run.recording.recording import Recording

    newest = max(fits, key=lambda path: path.stat().st_mtime)
    try:
        return player_page(Recording.read(newest)), ""
    except UserError as problem:
        return "", problem.message


def _text(values: Mapping[Any, Any], key: Any) -> str:
    return number_text(values[key] if is_number(values.get(key)) else None)


def _value(value: Any) -> str:
    text = "-" if value is None or value == "" else f"{value:g}" if isinstance(value, float) else str(value)
    return readable(text)
