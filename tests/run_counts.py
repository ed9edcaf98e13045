"""Counts of a run, computed again from the lines of its episodes: nothing counted twice, nothing lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from command_harness import records, summary_of

from omagd.run.checkpoint.store import folders as checkpoints

NEVER = 10**6
"""A `rollout_skip_threshold` with which no mastered start is forgotten, so that episodes alone say which are."""


def counts(run: Path) -> dict[str, Any]:
    """Return what a run has counted: its clock, and how often each map was played."""
    stage = summary_of(run)["stages"]["stage3"]
    clock = {name: stage["clock"][name] for name in ("epoch", "episodes", "updates")}
    return {**clock, "visits": {name: facts["visits"] for name, facts in tasks_of(run).items()}}


def tasks_of(run: Path) -> dict[str, dict[str, Any]]:
    """Return what the summary says of each map of a set."""
    return dict(summary_of(run).get("tasks", {}))


def miscounted(run: Path) -> list[str]:
    """Return which counts of a finished run are not those of its episodes; empty if all of them are.

    All ranks begin an iteration at the same `t_env`, and each one plays at least an episode in it.
    """
    config, clock = json.loads((run / "config.json").read_text()), summary_of(run)["stages"]["stage3"]["clock"]
    lines = [line for rank in episodes_of(run) for line in rank]
    wanted: dict[str, Any] = {
        "t_env": sum(line["length"] for line in lines),
        "episodes": len(lines),
        "epoch": len({line["t_env"] for line in lines}),
    }
    found = {name: clock[name] for name in wanted}
    for name, facts in tasks_of(run).items():
        own = [line for line in lines if line["task"] == name]
        wanted[name] = len(own), int(sum(line["battle_won"] for line in own))
        found[name] = facts["visits"], facts.get("wins", 0)
    if config["n_starts"] is None:  # no start comes again
        wanted["starts"], starts = config["group_size"], Counter((line.get("task"), line["seed"]) for line in lines)
        found["starts"] = max(starts.values())
    if config["group_size"] > 1:
        wanted |= _of_groups(run, config)
        state = torch.load(checkpoints(run / "checkpoints")[0] / "common.th", weights_only=True)["shared"]["groups"]
        steps = config["learner_args"]["epochs"] * config["learner_args"]["minibatches"]
        found |= {"updates": clock["updates"] / steps, "without groups": state["counts"][0]}
        if "mastered" in wanted:
            found["mastered"] = sorted(seed for _, seed, _ in state["mastered"])
            found["starts_mastered"] = int(records(run)[-1]["starts_mastered"])
    return [
        f"{name}: {found[name]}, but {wanted[name]} by its episodes" for name in wanted if found[name] != wanted[name]
    ]


def episodes_of(run: Path) -> list[list[dict[str, Any]]]:
    """Return the lines of all episodes, by rank."""
    paths = sorted((run / "episodes").glob("rank_*.jsonl"), key=lambda path: int(path.stem.split("_")[1]))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def _of_groups(run: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the updates, and the starts whose newest group was won by all, as the episodes say."""
    learned: dict[int, bool] = {}
    newest: dict[int, bool] = {}
    for began, seed, outcomes in sorted(_groups(run, config["group_size"]), key=lambda group: group[0]):
        mixed = len(set(outcomes)) > 1 or not config["enable_dynamic_sampling"]
        learned[began] = learned.get(began, False) or mixed
        newest[seed] = all(outcomes)
    facts = {"updates": sum(learned.values()), "without groups": len(learned) - sum(learned.values())}
    if config["rollout_skip_threshold"] != NEVER:
        return facts
    mastered = sorted(seed for seed, won in newest.items() if won)
    return {**facts, "mastered": mastered, "starts_mastered": len(mastered)}


def _groups(run: Path, size: int) -> Iterator[tuple[int, int, list[float]]]:
    """Yield each group by rank: the `t_env` at which its iteration began, its seed and its outcomes.

    A slot plays one episode in each round of an iteration.
    """
    for lines in episodes_of(run):
        rounds: Counter[tuple[int, int]] = Counter()
        groups: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        for line in lines:
            place = line["t_env"], line["slot"]
            groups.setdefault((line["t_env"], rounds[place], line["slot"] // size), []).append(line)
            rounds[place] += 1
        for (began, *_), group in groups.items():
            assert len(group) == size and len({line["seed"] for line in group}) == 1, group
            yield began, group[0]["seed"], [line["battle_won"] for line in group]
