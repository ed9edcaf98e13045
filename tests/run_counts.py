"""Counts of a run, computed again from the lines of its episodes: nothing counted twice, nothing lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from command_harness import summary_of

from omagd.run.checkpoint.store import folders as checkpoints


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
    for name, facts in summary_of(run).get("tasks", {}).items():
        own = [line for line in lines if line["task"] == name]
        wanted[name] = len(own), int(sum(line["battle_won"] for line in own))
        found[name] = facts["visits"], facts.get("wins", 0)
    starts = Counter((line.get("task"), line["seed"]) for line in lines)
    wanted["starts"], found["starts"] = config["group_size"], max(starts.values())
    if config["group_size"] > 1:
        wanted |= _of_groups(run, config)
        state = torch.load(checkpoints(run / "checkpoints")[0] / "common.th", weights_only=True)["shared"]["groups"]
        steps = config["learner_args"]["epochs"] * config["learner_args"]["minibatches"]
        found |= {"updates": clock["updates"] / steps, "without groups": state["counts"][0]}
    return [
        f"{name}: {found[name]}, but {wanted[name]} by its episodes" for name in wanted if found[name] != wanted[name]
    ]


def episodes_of(run: Path) -> list[list[dict[str, Any]]]:
    """Return the lines of all episodes, by rank."""
    paths = sorted((run / "episodes").glob("rank_*.jsonl"), key=lambda path: int(path.stem.split("_")[1]))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def _of_groups(run: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the updates with and without groups, as the episodes say."""
    learned: dict[int, bool] = {}
    for began, outcomes in _groups(run, config["group_size"]):
        mixed = len(set(outcomes)) > 1 or not config["enable_dynamic_sampling"]
        learned[began] = learned.get(began, False) or mixed
    return {"updates": sum(learned.values()), "without groups": len(learned) - sum(learned.values())}


def _groups(run: Path, size: int) -> Iterator[tuple[int, list[float]]]:
    """Yield each group by rank: the `t_env` at which its iteration began, and its outcomes.

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
            yield began, [line["battle_won"] for line in group]
