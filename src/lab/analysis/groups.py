"""Settings of runs, the keys in which they differ, and groups of runs that repeat one method with other seeds."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omagd.config.loading import HERE, read_yaml
from omagd.config.schema import REMOVED
from omagd.lab.analysis.runs import Run, load
from omagd.run.reporting.card import (
    COVERED,
    METHOD,
    NO_CARD,
    NO_EFFECT,
    READS,
    ROUNDING,
    Card,
    flattened,
    recorded_of,
    resumed,
)
from omagd.utils.errors import import_extra, readable

if TYPE_CHECKING:
    from pandas import DataFrame

WEIGHTS = ("pretrained_tokenizer_path", "pretrained_mask_predictor_path", "pretrain_buffer_path", "checkpoint_path")
"""Keys with paths: each seed may have its own."""

IF_MEANT = "fair if you compare what agents read"
"""Said where nothing else differs."""

LABELLED = frozenset({"name", "seed", "env", "evaluate"})
"""Keys that are no setting of a method: they have their own place in a table."""


def settings(run: Run) -> dict[str, Any]:
    """Return the values that make the method of a run, by dotted key: all but the seed, paths and what has no effect.

    Missing keys of earlier versions have their defaults, and removed keys are absent at theirs. Arguments of the
    environment that have its default are absent if the run has a card. Batch and environments are those of all ranks.
    """
    if not run.config or run.foreign:
        return {}
    values = {**_defaults(), **run.config}
    compared = run.card.get("compared", {})
    for key, name in COVERED.items():
        if name in compared:
            values[key] = compared[name]
    ranks = recorded_of(run.card).get("ranks", 1)
    if isinstance(ranks, int) and isinstance(values["graph_pretrain_batch_size"], int):
        values["graph_pretrain_batch_size"] *= ranks * bool(values["use_graph_reconstruction"])
    if compared:
        given = {key.removeprefix("env_args."): compared[key] for key in compared if key.startswith("env_args.")}
        values["env_args"] = given | {key: compared[key] for key in ("difficulty",) if key in compared}
    if isinstance(values["learner"], str):
        values["learner"] = values["learner"].removesuffix("_ddp")
    if values["lr_scaling"] != "none":
        values["world_size"] = ranks
    unused = (NO_EFFECT | ROUNDING | LABELLED) - ({"world_size"} if values["lr_scaling"] != "none" else set())
    flat = flattened({key: value for key, value in values.items() if key not in unused})
    gone = {key for key, (default, _) in REMOVED.items() if flat.get(key) == default}
    return {key: value for key, value in flat.items() if key not in {"env_args.map_name", *gone}}


@cache
def _defaults() -> dict[str, Any]:
    return read_yaml(HERE / "default.yaml")


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the keys in which the settings of runs differ, each with its values in the order of the runs."""
    return _differing([values for run in runs if (values := settings(run))])


def _differing(known: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    found = {}
    for key in dict.fromkeys(key for values in known for key in values):
        distinct = {frozen(values.get(key)): values.get(key) for values in known}
        if len(distinct) > 1:
            found[key] = list(distinct.values())
    return found


def frozen(value: Any) -> str:
    """Return a text that is equal for equal JSON values."""
    return json.dumps(value, sort_keys=True, default=str)


@dataclass(frozen=True)
class Group:
    """Runs that repeat one method with several seeds, on one map or several.

    Attributes:
        label: short name. values: the keys in which the groups differ, by dotted key.
    """

    label: str
    values: dict[str, Any]
    runs: tuple[Run, ...]

    def at(self, place: str) -> list[Run]:
        """Return the runs on one environment and map."""
        return [run for run in self.runs if run.place == place]


def groups(runs: Sequence[Run]) -> list[Group]:
    """Return runs grouped by their arm in a study, else by the keys in which runs on one map differ.

    Arms with one name in several studies are one group where their settings agree. Given weights may be
    another file for each seed; only where a seed occurs twice do their paths separate groups.
    """
    known = {run.folder: settings(run) for run in runs}
    keys: dict[str, None] = {}
    for place in dict.fromkeys((run.place, run.kind) for run in runs):
        there = [known[run.folder] for run in runs if (run.place, run.kind) == place and known[run.folder]]
        keys |= dict.fromkeys(_differing(there))
    keys |= {key: None for key in differing(runs) if key in METHOD}
    own: dict[Path, str] = {}
    parts: dict[str, list[Run]] = {}
    for run in runs:
        values_of = {key: known[run.folder].get(key) for key in keys}
        own[run.folder] = frozen(values_of | {key: bool(values_of[key]) for key in WEIGHTS if key in values_of})
        unread = "" if run.config else str(run.folder)
        within = [run.study, str(run.folder.parent)] if run.arm else own[run.folder]
        parts.setdefault(frozen([run.arm, within, run.kind, unread]), []).append(run)
    split: list[list[Run]] = []
    for part in _joined(list(parts.values()), own):
        paths: dict[str, list[Run]] = {}
        for run in part:
            path = [known[run.folder].get(key) for key in WEIGHTS] if repeated(part) and not run.arm else []
            paths.setdefault(frozen(path), []).append(run)
        split += paths.values()
    values = [
        dict.fromkeys(keys, "?") if part[0].foreign
        else {key: known[part[0].folder][key] for key in keys if key in known[part[0].folder]}
        for part in split
    ]  # fmt: skip
    labels = _labels(split, values)
    return [Group(*each) for each in zip(labels, values, map(tuple, split), strict=True)]


def _joined(parts: Sequence[list[Run]], own: Mapping[Path, str]) -> list[list[Run]]:
    """Return groups, those of arms with one name in several studies joined where `own`, their settings, agree.

    The maps that both have count, all maps if they share none.
    """

    def agree(one: Sequence[Run], other: Sequence[Run]) -> bool:
        both = {run.place for run in one} & {run.place for run in other}
        mine, theirs = ({own[run.folder] for run in part if run.place in both or not both} for part in (one, other))
        return mine == theirs

    found: list[list[Run]] = []
    for part in parts:
        about = (part[0].arm, part[0].kind, bool(part[0].config))
        for other in found if about[0] and about[2] else []:
            if about == (other[0].arm, other[0].kind, bool(other[0].config)) and agree(other, part):
                other += part
                break
        else:
            found.append(list(part))
    return found


def repeated(runs: Sequence[Run]) -> list[Run]:
    """Return the runs whose map and seed another run of these has too."""
    count = Counter((run.place, run.seed) for run in runs)
    return [run for run in runs if count[run.place, run.seed] > 1]


def _labels(parts: Sequence[Sequence[Run]], values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a short label for each group: its arm, or its configuration and as few keys as tell all groups apart."""
    names = [part[0].arm or part[0].name or part[0].label for part in parts]
    labels = list(names)
    for name in dict.fromkeys(names):
        same = [i for i, other in enumerate(names) if other == name]
        words: dict[int, list[str]] = {i: [] for i in same}
        for key in telling([values[i] for i in same]):
            for i in same:
                words[i].append(f"{key.rpartition('.')[2]}={shown(values[i], key)}")
        for i in same:
            only = len(same) == len(names) and words[i]
            labels[i] = ", ".join(words[i] if only else [name, *words[i]])
    labels = with_studies(labels, [part[0] for part in parts])
    count, pairs = Counter(labels), zip(labels, parts, strict=True)
    return [label if count[label] == 1 else f"{label} ({part[0].label})" for label, part in pairs]


def with_studies(labels: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Return the labels, those that runs of several studies have in common with the study."""
    studies: dict[str, set[str]] = {}
    for label, run in zip(labels, runs, strict=True):
        studies.setdefault(label, set()).add(run.study)
    pairs = zip(labels, runs, strict=True)
    return [f"{label} ({run.study})" if run.study and len(studies[label]) > 1 else label for label, run in pairs]


def telling(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a small set of keys that distinguishes the groups (greedy)."""
    keys, chosen = list(_differing(values)), list[str]()

    def kinds(some: Sequence[str]) -> int:
        return len({frozen([each.get(key) for key in some]) for each in values})

    while kinds(chosen) < kinds(keys):
        chosen.append(max(keys, key=lambda key: kinds([*chosen, key])))
    return chosen


def shown(values: Mapping[str, Any], key: str) -> str:
    """Return a setting as a short text; `default` where the environment's default holds."""
    if key not in values:
        return "default"
    value = values[key]
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return readable(os.path.basename(text.rstrip("/")) if key in WEIGHTS and text else text)[:40]


def differences(card: Card | None, first: Card | None) -> str:
    """Return the entries of `card` that must equal those of `first` and do not, as text; empty if all are equal."""
    if card is None or first is None:
        return "" if card is first else f"{NO_CARD}, so unknown" if card is None else "the first row has no card"
    ours, theirs = card["compared"], first["compared"]
    names = [name for name in dict.fromkeys([*theirs, *ours]) if ours.get(name) != theirs.get(name)]
    kind, first_kind = (each.get("kind", "training") for each in (card, first))
    words = []
    if kind != first_kind:  # only a training has some entries, such as its updates
        words = [f"{kind}, not {first_kind}"]
        names = [name for name in names if name.startswith("env_args.") or name in ours and name in theirs]
    words += [f"{name} {_shown(ours, name)}, not {_shown(theirs, name)}" for name in names]
    if names == [READS] and _code(card) == _code(first):
        words.append(IF_MEANT)
    elif _code(card) != _code(first):
        words.append(f"code omagd {_code(card)}, not {_code(first)}")
    return "; ".join(words)


def _code(card: Card) -> str:
    """Return the versions and commits with which a result was made, in the order of its starts."""
    starts = [*(entry.get("continues") for entry in resumed(card)), recorded_of(card).get("versions")]
    names = [str(found.get("omagd", "unknown")) for found in starts if isinstance(found, dict)]
    return ", then ".join(dict.fromkeys(names)) or "unknown"


def _shown(compared: Mapping[str, Any], name: str) -> str:
    missing = "the default" if name.startswith("env_args.") else "none"
    return str(compared[name]).replace(";", ",") if name in compared else missing  # `;` separates entries


def load_runs(folder: str | Path | Iterable[str | Path]) -> DataFrame:
    """Return the tests of all runs in folders as a table: a row for each run and test.

    Args:
        folder: a run, a folder of runs, a study, or the results file of a study; or several of these.
    Columns: run, arm (in a study, else the name of the configuration), env, map, seed, kind, finished, t_env (steps);
    wall_seconds (since stage 3 began), study (else ""), every metric of that record, and `config.<key>` for each key in
    which the runs differ. A run that has no test yet has one row without them.
    Errors: UserError where no run can be read, or pandas is missing. A damaged run among others is one warning.
    """
    DataFrame = import_extra("load_runs", "studies", "pandas").DataFrame
    runs = load([folder] if isinstance(folder, str | Path) else folder, "load_runs")
    keys = differing(runs)
    rows = []
    for run in runs:
        about = {"run": run.label, "arm": run.arm or run.name, "env": run.env, "map": run.map_name, "seed": run.seed}
        about |= {"kind": run.kind, "finished": run.finished}
        own = settings(run)
        config = {f"config.{key}": own.get(key) for key in keys}
        for record in run.tests or [{}]:
            metrics = {key: value for key, value in record.items() if key not in ("stage", "t_env", "wall_seconds")}
            times = {key: record.get(key) for key in ("t_env", "wall_seconds")} | {"study": run.study}
            rows.append({**about, **times, **metrics, **config})
    return DataFrame(rows)
