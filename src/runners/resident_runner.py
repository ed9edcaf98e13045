"""A runner whose battles, agents and episodes stay on the device where the agents act."""

from __future__ import annotations

from importlib.util import find_spec
from typing import cast

import numpy as np
import torch

from omagd import controllers
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.types import Exploration, Policy
from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.task_sets.sets import task_set
from omagd.runners.resident_loop import END, LENGTH, RESULTS, RETURN, ResidentLoop
from omagd.runners.rollout import Rollout
from omagd.runners.runner import Runner
from omagd.runners.starts import Origins
from omagd.utils.compiling import numba_problem
from omagd.utils.errors import UserError
from omagd.utils.packing import BlockEpisode, EpisodeMeta

SELECTORS = "greedy", "epsilon_greedy"
OVERRIDDEN = "act", "select_actions", "_build_inputs", "_values"
"""Methods of `BasicMAC` that work on NumPy arrays; a controller with others cannot act here."""


class ResidentRunner(Runner):
    """Plays rounds as `ParallelRunner` does, on the device of the agents: the host looks once, when a round is over.

    The same episodes for the same seeds and actions. Exploration differs: an action is a function of its episode's
    seed, its step and its agent, so it depends on no other episode. Policies that are no plain controllers (scripts,
    recorders) play in the environment, as with `ParallelRunner`. Episodes are views of memory that the next call uses
    again.
    """

    _made: tuple[tuple[object, ...], ResidentLoop] | None = None  # the last loop, and for what

    @staticmethod
    def check(config: Config) -> None:
        """Reject what cannot be played on a device. Errors: UserError."""
        kind = controllers.REGISTRY.get(config.mac)
        plain = issubclass(kind, BasicMAC) and all(getattr(kind, m) is getattr(BasicMAC, m) for m in OVERRIDDEN)
        on_gpu = config.use_cuda and torch.cuda.is_available() and not config.cpu_inference
        problems = {
            f"plays skirmish only, not env={config.env}": config.env != "skirmish",
            "plays one map, not a set of maps": task_set(config.env_args.get("map_name")) is not None,
            "plays in no other process, so not with env_processes=True": config.env_processes,
            f"reads flat observations, which mac={config.mac} does not": not plain,
            f"chooses {' or '.join(SELECTORS)}, not action_selector={config.action_selector}": (
                config.action_selector not in SELECTORS
            ),
            f"needs Numba, which {numba_problem()}": bool(numba_problem()),
            "needs numba-cuda on a GPU: pip install .[gpu]": on_gpu and find_spec("numba_cuda") is None,
        }
        for problem, found in problems.items():
            if found:
                raise UserError(f"runner=resident: {problem}. Use runner=parallel")

    def run(
        self,
        policy: Policy,
        *,
        explore: Exploration | None,
        episodes_per_slot: int = 1,
        full_obs: bool = False,
        keep: bool = True,
    ) -> Rollout:
        """Play `episodes_per_slot` episodes in every slot. Arguments and result: as in `Runner.run`."""
        if not isinstance(policy, BasicMAC):
            return super().run(
                policy, explore=explore, episodes_per_slot=episodes_per_slot, full_obs=full_obs, keep=keep
            )
        self.prepare()
        policy.refresh()
        loop = self._resident(policy, episodes_per_slot, full_obs, keep)
        origins = [self.stream.origins(np.ones(self.env.n_slots, bool)) for _ in range(episodes_per_slot)]
        seeds = np.stack([each.seed for each in origins])
        loop.play(seeds, None if explore is None else explore.epsilon, self.ticked)
        self.ticked(False)
        return self._collected(loop, origins)

    def _resident(self, mac: BasicMAC, episodes: int, full_obs: bool, keep: bool) -> ResidentLoop:
        """Return the loop for such rounds; it keeps its memory from round to round."""
        from omagd.envs.battle.compiled.resident import ResidentBattles

        key = (mac, episodes, full_obs, keep)
        if self._made is None or self._made[0] != key:
            env = cast(SkirmishEnv, self.env)
            battles = ResidentBattles(env.spec, cast(SkirmishArgs, env.args), env.n_slots, mac.acting_device)
            self._made = key, ResidentLoop(battles, mac, self.info, episodes, full_obs, keep)
        return self._made[1]

    def _collected(self, loop: ResidentLoop, origins: list[Origins]) -> Rollout:
        """Return what was played: the host reads the results of a round at once."""
        slots, rollout = self.env.n_slots, Rollout()
        results = torch.cat([loop.results.flatten(), loop.battles.faults.double()]).tolist()
        if any(results[-slots:]):
            raise RuntimeError("resident battles were given actions that are not available")
        width = loop.results.shape[1]
        found = [results[e * width : (e + 1) * width] for e in range(slots * loop.episodes)]
        for e in sorted(range(len(found)), key=lambda e: (found[e][END], e % slots)):
            slot, origin, values = e % slots, origins[e // slots], found[e]
            seed, length, outcome = (
                int(origin.seed[slot]),
                int(values[LENGTH]),
                dict(zip(RESULTS, values, strict=False)),
            )
            rollout.end(slot, seed, length, values[RETURN], outcome)
            if loop.rows:
                meta = EpisodeMeta(slot, seed, outcome=outcome["battle_won"])
                rollout.episodes.append(BlockEpisode(loop.rows, e, length + 1, meta))
        return rollout
