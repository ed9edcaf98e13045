"""Folders of runs as a training writes them, with made-up results: for what reads many runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch

from omagd.config.loading import resolve, to_plain
from omagd.run.reporting.card import make_card
from omagd.run.run_folder import write_json

STEPS = (100, 10_100, 20_100, 30_100)


@cache
def _facts(config: str, env: str, updates: tuple) -> tuple[str, str]:
    made = resolve(config, env, dict(updates))
    return json.dumps(to_plain(made)), json.dumps(make_card(made, 1, torch.device("cpu")))


def make_run(
    folder: Path,
    won: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75),
    config: str = "qmix",
    env: str = "skirmish",
    steps: tuple[int, ...] = STEPS,
    seconds_per_step: float = 0.01,
    finished: bool = True,
    more: Mapping[str, Sequence[float]] = MappingProxyType({}),
    **updates,
) -> Path:
    """Write a run with the win rates `won` in its tests at `steps`.

    more: further values of the tests, by name. updates: keys, `__` for a dot.
    """
    keys = tuple(sorted((key.replace("__", "."), value) for key, value in updates.items()))
    values, card = map(json.loads, _facts(config, env, keys))
    folder.mkdir(parents=True)
    write_json(folder / "config.json", values)
    write_json(folder / "card.json", card)
    write_json(folder / "run.json", {"identity": "x", **({"finished": True} if finished else {})})
    lines = [
        {"stage": "stage3", "t_env": t, "wall_seconds": seconds_per_step * t, "test_battle_won_mean": rate,
         "test_return_mean": 20 * rate, "loss_td": 0.1, **{name: values[i] for name, values in more.items()}}
        for i, (t, rate) in enumerate(zip(steps, won, strict=False))
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        results = {"test_battle_won_mean": won[-1], "best_test_battle_won_mean": max(won)}
        stage = {"clock": {"t_env": steps[len(won) - 1], "updates": 10}, "values": results}
        summary = {
            "exit_state": "completed", "kind": "training", "name": values["name"], "env": values["env"],
            "map_name": values["env_args"].get("map_name", ""), "seed": values["seed"], "card": card,
            "wall_seconds": 60.0, "stages": {"stage3": stage}, "folder": str(folder),
        }  # fmt: skip
        write_json(folder / "summary.json", summary)
    return folder


def make_study(root: Path, rates=(0.0003, 0.001, 0.005), maps=("3m",), seeds=(1, 2), **more) -> Path:
    """Write a run for each learning rate, map and seed; the win rate in the end depends on all three."""
    for i, rate in enumerate(rates):
        for j, map_name in enumerate(maps):
            for seed in seeds:
                top = min(1.0, 0.2 + 0.2 * i + 0.05 * j + 0.02 * seed)
                won = tuple(top * k / 3 for k in range(4))
                name = f"lr{rate}_{map_name}_seed{seed}"
                make_run(root / name, won, lr=rate, seed=seed, env_args__map_name=map_name, **more)
    return root


SET = {"3m": 0.1, "5m": 0.3, "10m": 0.5, "4m": 0.7}
"""Win rates in the last test of `make_run_on_a_set`, by map of marine-easy: the last map is held out."""


def make_run_on_a_set(folder: Path, **updates) -> Path:
    """Write a run on the set marine-easy whose win rates on four maps grow to those of `SET`, plus seed / 100."""
    ends = {name: end + updates["seed"] / 100 for name, end in SET.items()}
    more = {f"test/{name}/battle_won_mean": [end * k / 3 for k in range(4)] for name, end in ends.items()}
    more["test_held_out_battle_won_mean"] = more["test/4m/battle_won_mean"]
    whole = sum(list(ends.values())[:3]) / 3
    won = tuple(whole * k / 3 for k in range(4))
    return make_run(folder, won, config="hpn_qmix", env_args__map_name="marine-easy", more=more, **updates)
