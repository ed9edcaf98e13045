"""A runner whose battles, agents and episodes stay on the device where the agents act."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch

from omagd import controllers, envs
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.graph_mac import NGraphMAC
from omagd.controllers.types import Exploration, Policy
from omagd.envs.factory import validate_env_args
from omagd.envs.resident import CanBeResident
from omagd.envs.task_sets.sets import task_set
from omagd.modules.graph_reconstructers import REGISTRY as PREDICTORS
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.runners.resident_loop import END, LENGTH, RESULTS, RETURN, ResidentLoop
from omagd.runners.rollout import Rollout
from omagd.runners.runner import Runner
from omagd.runners.starts import Origins
from omagd.utils.errors import UserError
from omagd.utils.packing import BlockEpisode, EpisodeMeta

SELECTORS = "greedy", "epsilon_greedy"
OVERRIDDEN = "act", "select_actions", "_build_inputs", "_values", "_update_state"
"""Methods of controllers that work on NumPy arrays; a controller with others than these two have cannot act here."""


def acts_here(kind: type) -> bool:
    """Return whether what a controller of this class computes is what `ResidentLoop` does."""
    return issubclass(kind, BasicMAC) and all(
        getattr(kind, name) in (getattr(BasicMAC, name), getattr(NGraphMAC, name)) for name in OVERRIDDEN
    )


def plays_here(kind: type) -> bool:
    """Return whether an environment of this class says itself that it can be played on a device.

    What its base class says is not enough: its rules may differ.
    """
    return "resident" in vars(kind)


def fitting(registry: Any, fits: Any) -> str:
    """Return the names of what fits in a registry."""

    def names() -> Iterator[str]:
        for name in registry.names():
            with suppress(UserError):  # of a broken plug-in, which this run does not need
                if fits(registry.get(name)):
                    yield name

    return ", ".join(sorted(names()))


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
        env = cast(Any, envs.REGISTRY.get(config.env))
        kind = config.mask_predictor_config.kind
        on_gpu = config.use_cuda and torch.cuda.is_available() and not config.cpu_inference
        problems = {
            "plays in no other process, so not with env_processes=True": config.env_processes,
            f"chooses {' or '.join(SELECTORS)}, not action_selector={config.action_selector}": (
                config.action_selector not in SELECTORS
            ),
            "plays one map, not a set of maps": task_set(config.env_args.get("map_name")) is not None,
            "shows agents what they see or everything, so not with use_team_obs=True": config.use_team_obs,
            f"reconstructs with mask_predictor_config.kind=masked, not kind={kind}": (
                config.use_graph_reconstruction and not issubclass(PREDICTORS.get(kind), TokenReconstructor)
            ),
            "reconstructs where it acts, so not with cpu_inference=True and use_graph_reconstruction=True": (
                config.cpu_inference and config.use_graph_reconstruction
            ),
        }
        if not plays_here(env):
            problems[f"plays {fitting(envs.REGISTRY, plays_here)} only, not env={config.env}"] = True
        elif problem := env.why_not_resident(validate_env_args(config.env, dict(config.env_args)), on_gpu):
            problems[problem] = True
        if not acts_here(controllers.REGISTRY.get(config.mac)):
            problems[f"acts by mac={fitting(controllers.REGISTRY, acts_here)}, not mac={config.mac}"] = True
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
        loop.play(seeds, explore, self.ticked)
        self.ticked(False)
        return self._collected(loop, origins)

    def _resident(self, mac: BasicMAC, episodes: int, full_obs: bool, keep: bool) -> ResidentLoop:
        """Return the loop for such rounds; it keeps its memory from round to round."""
        key = (mac, episodes, full_obs, keep)
        if self._made is None or self._made[0] != key or not self._made[1].is_current:
            self._made = None  # its memory first
            game = cast(CanBeResident, self.env).resident(mac.acting_device)
            self._made = key, ResidentLoop(game, mac, self.info, episodes, full_obs, keep)
        return self._made[1]

    def _collected(self, loop: ResidentLoop, origins: list[Origins]) -> Rollout:
        """Return what was played: the host reads the results of a round at once."""
        slots, rollout = self.env.n_slots, Rollout()
        results = torch.cat([loop.results.flatten(), loop.game.faults.double()]).tolist()
        if any(results[-slots:]):
            raise RuntimeError("runner=resident: the environment was given actions that are not available")
        found = np.array(results[:-slots]).reshape(slots * loop.episodes, -1)
        order = np.lexsort((np.arange(len(found)) % slots, found[:, END]))
        found, slot_of = found[order], (order % slots).tolist()
        seed_of = np.concatenate([origin.seed for origin in origins])[order].tolist()
        lengths, places = found[:, LENGTH].astype(np.int64).tolist(), order.tolist()
        values = {"return": found[:, RETURN], "ep_length": found[:, LENGTH]}
        values |= {name: found[:, RESULTS + i] for i, name in enumerate(loop.game.results)}
        if not np.isfinite(found).all():
            raise RuntimeError("runner=resident: a return or a result is not finite")
        rollout.n_episodes, rollout.steps = len(found), sum(lengths)
        # Sums in the order of the episodes, as those of other runners.
        rollout.stats = {name: (float(np.add.accumulate(v)[-1]), float(len(v))) for name, v in values.items()}
        logged = "slot", "seed", "length", "return", *loop.game.results
        columns = slot_of, seed_of, lengths, *(values[name].tolist() for name in logged[3:])
        rollout.log = [dict(zip(logged, row, strict=True)) for row in zip(*columns, strict=True)]
        if loop.rows:
            won = values["battle_won"].tolist()
            rollout.episodes = [
                BlockEpisode(loop.rows, e, length + 1, EpisodeMeta(slot, seed, outcome=outcome))
                for e, slot, seed, length, outcome in zip(places, slot_of, seed_of, lengths, won, strict=True)
            ]
        return rollout
