"""Record what SMAC or SMACv2 return on the stand-in.

python tests/smac_parity/record.py (--smac PATH | --smacv2 PATH) [--check] [groups ...]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import sc2_stand_in
import yaml

import omagd.envs.sc2.client  # noqa: F401  enters s2clientprotocol's modules, which SMAC then finds
from smac_parity import DATA, GROUPS, SEED, V2_GROUPS, Group, Log, interface_facts, moments_to_keep, pack


class Clock:
    """`time` for pysc2, which waits a second between attempts to connect; the stand-in is quicker."""

    time = staticmethod(time.time)

    @staticmethod
    def sleep(seconds: float) -> None:
        """Wait a twentieth of it."""
        time.sleep(seconds / 20)


class Player:
    """Chooses the agents' actions, from what SMAC knows.

    Args:
        env: SMAC's or SMACv2's environment. seed: of the choices.
    """

    def __init__(self, env: Any, seed: int) -> None:
        self._env, self._rng, self._first_target = env, np.random.default_rng(seed), env.n_actions_no_attack

    def choose(self, policy: str) -> list[int]:
        """Return one action for each agent.

        Policies: `random`, `idle` (stop), `scripted` (attack the nearest in reach, a medivac the weakest, else walk to
        whom is nearest; where there are directions to look in, now and then turn to another), `kiting` (step back while
        the weapon is not ready).
        """
        available = [np.flatnonzero(row) for row in self._env.get_avail_actions()]
        if policy == "idle":
            return [int(row[0]) for row in available]
        if policy == "random":
            return [int(self._rng.choice(row)) for row in available]
        return [self._fight(agent, row, policy == "kiting") for agent, row in enumerate(available)]

    def _fight(self, agent: int, available: np.ndarray, kites: bool) -> int:
        env, first = self._env, self._first_target
        me, foes = env.agents[agent], [u for u in env.enemies.values() if u.health > 0]
        if me.health == 0 or not foes:
            return int(available[0])
        foe = min(foes, key=lambda unit: self._distance(me, unit))
        if kites and me.weapon_cooldown > 0 and self._distance(me, foe) < 4.5:
            return self._walk(me.pos.x - foe.pos.x, me.pos.y - foe.pos.y, available)
        targets = [int(action) for action in available if action >= first]
        turns = [int(action) for action in available if 6 <= action < first]
        if turns and self._rng.random() < 0.4:
            return int(self._rng.choice(turns))
        if targets and env.map_type in ("MMM", "terran_gen") and me.unit_type == env.medivac_id:
            return min(targets, key=lambda action: env.agents[action - first].health)
        if targets:
            return min(targets, key=lambda action: self._distance(me, env.enemies[action - first]))
        return self._walk(foe.pos.x - me.pos.x, foe.pos.y - me.pos.y, available)

    @staticmethod
    def _distance(one: Any, other: Any) -> float:
        return float(np.hypot(one.pos.x - other.pos.x, one.pos.y - other.pos.y))

    def _walk(self, dx: float, dy: float, available: np.ndarray) -> int:
        along_x, along_y = (4 if dx > 0 else 5), (2 if dy > 0 else 3)
        wishes = [along_x, along_y] if abs(dx) > abs(dy) else [along_y, along_x]
        return next((move for move in wishes if move in available), int(self._rng.choice(available)))


def perform(group: Group) -> list[np.ndarray]:
    """Play the group's battles with SMAC's own flags and return the actions, one array [steps, n] for each battle."""
    from smac.env import StarCraft2Env

    env, battles = StarCraft2Env(map_name=group.map_name, seed=SEED, **group.args), []
    player = Player(env, SEED)
    for policy, most in group.battles:
        env.reset()
        chosen, over = [], False
        while not over and len(chosen) < most:
            chosen.append(player.choose(policy))
            _, over, _ = env.step(list(chosen[-1]))
        battles.append(np.array(chosen, np.uint8))
    env.close()
    return battles


def listen(group: Group, case: dict[str, Any], battles: list[np.ndarray], first_case: bool) -> Log:
    """Return what SMAC says to these actions."""
    from smac.env import StarCraft2Env

    env, log = StarCraft2Env(map_name=group.map_name, seed=SEED, **group.args, **case), Log()

    def see(moment: int, steps: int) -> None:
        keep = moment in moments_to_keep(steps, first_case)
        log.see(np.array(env.get_obs()), env.get_state(), np.array(env.get_avail_actions()),
                env.get_visibility_matrix(), keep)  # fmt: skip

    for actions in battles:
        env.reset()
        see(0, len(actions))
        for step, row in enumerate(actions.tolist()):
            log.note(*env.step(row))
            see(step + 1, len(actions))
    log.facts = interface_facts(env)
    env.close()
    return log


def record(group: Group, folder: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a group; `folder` takes the tape."""
    tape = folder / "tape.npz"
    os.environ["SC2_STAND_IN_RECORD"] = str(tape)
    if group.rough:
        os.environ["SC2_STAND_IN_ROUGH"] = "1"
    if group.lingers:
        os.environ["SC2_STAND_IN_LINGER"] = "1"
    battles = perform(group)
    del os.environ["SC2_STAND_IN_RECORD"]
    os.environ.pop("SC2_STAND_IN_ROUGH", None)
    with np.load(tape) as data:
        arrays = dict(data)
    assert arrays["steps"].tolist() == [len(actions) for actions in battles]
    arrays["actions"] = np.concatenate(battles)
    os.environ["SC2_STAND_IN_TAPE"] = str(tape)
    logs = [listen(group, case, battles, number == 0) for number, case in enumerate(group.cases)]
    del os.environ["SC2_STAND_IN_TAPE"]
    os.environ.pop("SC2_STAND_IN_LINGER", None)
    return arrays | pack(logs)


class Order:
    """`random` for SMACv2's environment: shuffles from a seed and remembers how."""

    def __init__(self) -> None:
        self._random, self.last = random.Random(SEED), []

    def shuffle(self, values: list[int]) -> None:
        """Shuffle in place."""
        self._random.shuffle(values)
        self.last = list(values)


def v2_args(group: Group, checkout: Path) -> dict[str, Any]:
    """Return the published configuration of the group's race with what the group changes."""
    folder = checkout / "smacv2" / "examples" / "configs"
    args = yaml.safe_load((folder / f"sc2_{group.map_name[2:]}.yaml").read_text())["env_args"]
    changes = dict(group.args)
    for key in ("n_units", "n_enemies"):
        args["capability_config"][key] = changes.pop(key, args["capability_config"][key])
    return {**args, **changes, "map_name": group.map_name, "seed": SEED}


def draw_resets(args: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return teams and start positions of so many battles, drawn by SMACv2's own distributions from a seed."""
    from smacv2.env.starcraft2 import distributions
    from smacv2.env.starcraft2.wrapper import StarCraftCapabilityEnvWrapper

    seeds = iter(range(SEED, SEED + 1000))
    distributions.default_rng = lambda: np.random.default_rng(next(seeds))
    random.seed(SEED)
    drawn = StarCraftCapabilityEnvWrapper(**args).env_key_to_distribution_map.values()
    return [{key: value for one in drawn for key, value in one.generate().items()} for _ in range(count)]


def play_v2(group: Group, args: dict[str, Any], resets: list[dict[str, Any]], battles: list[np.ndarray] | None) -> Any:
    """Play the battles, with the actions given if any.

    Returns (actions of each battle, log, orders of looking at the agents: at resets, later).
    """
    from smacv2.env.starcraft2 import starcraft2

    starcraft2.random = order = Order()
    env, log, orders, played = starcraft2.StarCraft2Env(**args), Log(), ([], []), []
    player = Player(env, SEED)

    def see() -> None:
        obs = np.array(env.get_obs())
        orders[1].append(order.last)
        log.see(obs, env.get_state(), np.array(env.get_avail_actions()), env.get_visibility_matrix(),
                len(log.digests) % 10 == 0)  # fmt: skip

    for number, (policy, most) in enumerate(group.battles):
        env.reset(resets[number])  # looks once itself, before `see` does
        orders[0].append(order.last)
        see()
        chosen, over = [], False
        while not over and len(chosen) < most:
            chosen.append(player.choose(policy) if battles is None else battles[number][len(chosen)].tolist())
            reward, over, info = env.step(list(chosen[-1]))
            log.note(reward, over, info)
            see()
        played.append(np.array(chosen, np.uint8))
    log.facts = interface_facts(env)
    env.close()
    return played, log, orders


def plain(value: Any) -> Any:
    """Return arrays and their scalars as plain lists and values."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, np.ndarray)):
        return [plain(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def record_v2(group: Group, folder: Path, checkout: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a group of SMACv2; `folder` takes the tape."""
    tape, args = folder / "tape.npz", v2_args(group, checkout)
    resets = draw_resets(args, len(group.battles))
    os.environ["SC2_STAND_IN_RECORD"] = str(tape)
    battles, log, orders = play_v2(group, args, resets, None)
    del os.environ["SC2_STAND_IN_RECORD"]
    os.environ["SC2_STAND_IN_TAPE"] = str(tape)
    _, again, _ = play_v2(group, args, resets, battles)
    del os.environ["SC2_STAND_IN_TAPE"]
    assert (again.digests, again.rewards, again.outcomes) == (log.digests, log.rewards, log.outcomes)
    with np.load(tape) as data:
        arrays = dict(data)
    arrays["actions"] = np.concatenate(battles)
    arrays["order_at_reset"], arrays["order"] = (np.array(rows, np.uint8) for rows in orders)
    arrays["args"], arrays["resets"] = np.array(json.dumps(args)), np.array(json.dumps(plain(resets)))
    return arrays | pack([log])


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
    parser.add_argument("groups", nargs="*", help="names in smac_parity.GROUPS, V2_GROUPS; all by default")
    options = parser.parse_args()
    from pysc2.lib import remote_controller

    remote_controller.time = Clock
    sys.path.insert(0, str(options.smac or options.smacv2))
    todo = GROUPS if options.smac else V2_GROUPS
    DATA.mkdir(exist_ok=True)
    different = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SC2PATH"] = str(sc2_stand_in.install(Path(folder) / "StarCraftII"))
        for name in options.groups or todo:
            start, path, group = time.monotonic(), DATA / f"{name}.npz", todo[name]
            if options.smac:
                arrays = record(group, Path(folder))
            else:
                arrays = record_v2(group, Path(folder), options.smacv2)
            if not options.check:
                np.savez_compressed(path, **arrays)
            elif not same(path, arrays):
                different.append(name)
            verdict = "DIFFERENT" if name in different else f"{path.stat().st_size / 1000:.1f} kB"
            print(f"{name}: battles of {arrays['steps'].tolist()} steps, {len(group.cases)} cases, "
                  f"{time.monotonic() - start:.1f} s, {verdict}", flush=True)  # fmt: skip
    sys.exit(f"different: {' '.join(different)}" if different else 0)


if __name__ == "__main__":
    main()
