"""Record what SMAC or SMACv2 return on the stand-in, for tests/test_smac_parity.py.

python benchmarks/record_smac.py (--smac PATH | --smacv2 PATH) [--check] [groups ...]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import sc2_stand_in
import yaml
from smac_parity import DATA, GROUPS, SEED, Group, Log, play

import omagd.envs.sc2.client  # noqa: F401  enters s2clientprotocol's modules, which SMAC then finds


class Player:
    """Chooses the agents' actions from a fixed seed, by what SMAC's or SMACv2's environment `env` knows."""

    def __init__(self, env: Any) -> None:
        self._env, self._rng, self._first_target = env, np.random.default_rng(SEED), env.n_actions_no_attack

    def battle(self, policy: str, most: int) -> Iterator[list[int]]:
        """Yield the agents' actions, step by step.

        Policies: `random`, `idle` (stop), `scripted` (attack the nearest in reach, a medivac the weakest, else walk to
        the nearest; where there are view directions, now and then turn to another), `kiting` (step back while the
        weapon is not ready).
        """
        for _ in range(most):
            available = [np.flatnonzero(row) for row in self._env.get_avail_actions()]
            if policy == "idle":
                yield [int(row[0]) for row in available]
            elif policy == "random":
                yield [int(self._rng.choice(row)) for row in available]
            else:
                yield [self._fight(agent, row, policy == "kiting") for agent, row in enumerate(available)]

    def _fight(self, agent: int, available: np.ndarray, kites: bool) -> int:
        env, first = self._env, self._first_target
        me, enemies = env.agents[agent], [u for u in env.enemies.values() if u.health > 0]
        if me.health == 0 or not enemies:
            return int(available[0])
        enemy = min(enemies, key=lambda unit: self._distance(me, unit))
        if kites and me.weapon_cooldown > 0 and self._distance(me, enemy) < 4.5:
            return self._walk(me.pos.x - enemy.pos.x, me.pos.y - enemy.pos.y, available)
        targets = [int(action) for action in available if action >= first]
        turns = [int(action) for action in available if 6 <= action < first]
        if turns and self._rng.random() < 0.4:
            return int(self._rng.choice(turns))
        if targets and env.map_type in ("MMM", "terran_gen") and me.unit_type == env.medivac_id:
            return min(targets, key=lambda action: env.agents[action - first].health)
        if targets:
            return min(targets, key=lambda action: self._distance(me, env.enemies[action - first]))
        return self._walk(enemy.pos.x - me.pos.x, enemy.pos.y - me.pos.y, available)

    @staticmethod
    def _distance(one: Any, other: Any) -> float:
        return float(np.hypot(one.pos.x - other.pos.x, one.pos.y - other.pos.y))

    def _walk(self, dx: float, dy: float, available: np.ndarray) -> int:
        along_x, along_y = (4 if dx > 0 else 5), (2 if dy > 0 else 3)
        wishes = [along_x, along_y] if abs(dx) > abs(dy) else [along_y, along_x]
        return next((move for move in wishes if move in available), int(self._rng.choice(available)))


class Smac:
    """SMAC's environments of one group."""

    def __init__(self, group: Group, checkout: Path) -> None:
        self._group = group

    def open(self, case: dict[str, Any]) -> Any:
        """Return a new environment for a case."""
        from smac.env import StarCraft2Env

        self.env = StarCraft2Env(map_name=self._group.map_name, seed=SEED, **self._group.args, **case)
        return self.env

    def reset(self, number: int) -> None:
        """Start a battle."""
        self.env.reset()

    def arrays(self, battles: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Return what a group holds besides tape, actions and logs."""
        return {}


class Smacv2(Smac):
    """SMACv2's environments of one group; in place of its `random`, shuffles from a seed and remembers the orders."""

    def __init__(self, group: Group, checkout: Path) -> None:
        """Change the published configuration of the group's race, and draw teams and start positions from a seed."""
        from smacv2.env.starcraft2 import distributions
        from smacv2.env.starcraft2.wrapper import StarCraftCapabilityEnvWrapper

        folder = checkout / "smacv2" / "examples" / "configs"
        args = yaml.safe_load((folder / f"sc2_{group.map_name[2:]}.yaml").read_text())["env_args"]
        changes = dict(group.args)
        for key in ("n_units", "n_enemies"):
            args["capability_config"][key] = changes.pop(key, args["capability_config"][key])
        self._args = {**args, **changes, "map_name": group.map_name, "seed": SEED}
        seeds = iter(range(SEED, SEED + 1000))
        distributions.default_rng = lambda: np.random.default_rng(next(seeds))
        random.seed(SEED)
        drawn = StarCraftCapabilityEnvWrapper(**self._args).env_key_to_distribution_map.values()
        self._resets = [{key: value for one in drawn for key, value in one.generate().items()} for _ in group.battles]

    def open(self, case: dict[str, Any]) -> Any:
        """Return a new environment."""
        from smacv2.env.starcraft2 import starcraft2

        starcraft2.random, self._random, self._orders = self, random.Random(SEED), []
        self.env = starcraft2.StarCraft2Env(**self._args)
        return self.env

    def shuffle(self, agents: list[int]) -> None:
        """Shuffle in place, as `random.shuffle`."""
        self._random.shuffle(agents)
        self._orders.append(list(agents))

    def reset(self, number: int) -> None:
        """Start a battle with its teams; the agents observe once."""
        self.env.reset(self._resets[number])

    def arrays(self, battles: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Return orders of observing, `env_args`, teams and positions."""
        orders = np.array(self._orders, np.uint8)
        resets = np.cumsum([0, *(len(actions) + 2 for actions in battles[:-1])])
        args, drawn = (json.dumps(part, default=lambda array: array.tolist()) for part in (self._args, self._resets))
        arrays = {"order_at_reset": orders[resets], "order": np.delete(orders, resets, axis=0)}
        return {**arrays, "args": np.array(args), "resets": np.array(drawn)}


def record(group: Group, folder: Path, checkout: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a group; `folder` takes the tape."""
    tape, logs = folder / "tape.npz", []
    game = (Smacv2 if group.second else Smac)(group, checkout)
    lingers = {"SC2_STAND_IN_LINGER": "1"} if group.lingers else {}
    rough = {"SC2_STAND_IN_ROUGH": "1"} if group.rough else {}
    with patch.dict(os.environ, {"SC2_STAND_IN_RECORD": str(tape), **lingers, **rough}):
        player = Player(game.open({}))
        _, battles = play(game.env, group, 0, (player.battle(*how) for how in group.battles), game.reset)
        game.env.close()
    with patch.dict(os.environ, {"SC2_STAND_IN_TAPE": str(tape), **lingers}):
        for number, case in enumerate(group.cases):
            logs.append(play(game.open(case), group, number, [b.tolist() for b in battles], game.reset)[0])
            game.env.close()
    with np.load(tape) as data:
        return {**data, "actions": np.concatenate(battles), **game.arrays(battles), **pack(logs)}


def pack(logs: list[Log]) -> dict[str, np.ndarray]:
    """Return the logs of a group's cases as arrays: those of one shape stacked, what was kept by the case's number."""
    arrays = {
        "digests": np.array([log.digests for log in logs], np.uint32),
        "rewards": np.array([log.rewards for log in logs], np.float32),
        "outcomes": np.array([log.outcomes for log in logs], np.int8),
        "facts": np.array([json.dumps(log.facts) for log in logs]),
    }
    for number, log in enumerate(logs):
        if number and log.digests == logs[0].digests:
            continue  # nothing else to see than in the first case
        moments, obs, states = zip(*log.kept, strict=True)
        arrays[f"moments_{number}"] = np.array(moments, np.int32)
        arrays[f"obs_{number}"], arrays[f"states_{number}"] = np.stack(obs), np.stack(states)
    return arrays


def same(path: Path, arrays: dict[str, np.ndarray]) -> bool:
    """Return whether the file holds these arrays."""
    with np.load(path) as stored:
        return set(stored) == set(arrays) and all(np.array_equal(stored[key], arrays[key]) for key in arrays)


def main() -> None:
    """Record, or with --check compare with what is stored."""
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)  # pysc2 refuses two maps of one name
    which.add_argument("--smac", type=Path, help="checkout of oxwhirl/smac")
    which.add_argument("--smacv2", type=Path, help="checkout of oxwhirl/smacv2")
    parser.add_argument("--check", action="store_true", help="compare with the stored arrays instead of writing")
    parser.add_argument("groups", nargs="*", help="names in smac_parity.GROUPS; all by default")
    options = parser.parse_args()
    from pysc2.lib import remote_controller

    # pysc2 waits a second between attempts to connect; the stand-in is quicker.
    remote_controller.time = SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(seconds / 20))
    checkout = options.smac or options.smacv2
    sys.path.insert(0, str(checkout))
    different = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SC2PATH"] = str(sc2_stand_in.install(Path(folder) / "StarCraftII"))
        for group in GROUPS.values():
            if group.second != bool(options.smacv2) or group.name not in (options.groups or GROUPS):
                continue
            start, path, arrays = time.monotonic(), DATA / f"{group.name}.npz", record(group, Path(folder), checkout)
            if not options.check:
                np.savez_compressed(path, **arrays)
            elif not same(path, arrays):
                different.append(group.name)
            verdict = "DIFFERENT" if group.name in different else f"{path.stat().st_size / 1000:.1f} kB"
            print(f"{group.name}: battles of {arrays['steps'].tolist()} steps, {len(group.cases)} cases, "
                  f"{time.monotonic() - start:.1f} s, {verdict}", flush=True)  # fmt: skip
    sys.exit(f"different: {' '.join(different)}" if different else 0)


if __name__ == "__main__":
    main()
