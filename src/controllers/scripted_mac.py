"""Policies without learning: scripts of the environment and random actions."""

from __future__ import annotations

from typing import Any

import numpy as np

from omagd.controllers.types import Decision, Exploration, Tick
from omagd.envs.protocol import BatchedEnv, random_actions
from omagd.utils.errors import unknown_name

RANDOM = "random"


class ScriptedPolicy:
    """Plays each episode with one of several scripts, mixed with random actions; for collecting diverse data.

    The share of random actions is drawn for each episode from Beta(2s, 2(1 - s)), whose mean is s = `random_share`:
    some episodes are nearly scripted, some nearly random. Without scripts, or with ("random",), actions are uniform
    over the available ones, which works in every environment.

    Args:
        env: whose scripts are used. policies: names to draw from; empty for ("random",). random_share: s, in [0, 1].
        rng: random generator.

    Errors: UserError for a policy that the environment does not have.
    """

    wants_full_obs = False

    def __init__(
        self, env: BatchedEnv, policies: tuple[str, ...], random_share: float, rng: np.random.Generator
    ) -> None:
        self.policies = policies or (RANDOM,)
        known = {RANDOM, *env.info.scripted_policies}
        for name in self.policies:
            if name not in known:
                raise unknown_name(f"graph_pretrain_policy: env={env.info.name}: scripted policy", name, sorted(known))
        self._env = env
        self._random_share = random_share
        self._rng = rng
        self.begin(env.n_slots)

    def begin(self, n_slots: int) -> None:
        """Prepare for `n_slots` slots."""
        self._script = np.zeros(n_slots, np.int64)
        self._share = np.zeros(n_slots)

    def reset(self, which: np.ndarray) -> None:
        """Draw a script and a share of random actions for each slot in `which` [B] bool."""
        count, s = int(which.sum()), self._random_share
        self._script[which] = self._rng.integers(len(self.policies), size=count)
        self._share[which] = self._rng.beta(2 * s, 2 * (1 - s), size=count) if 0 < s < 1 else s

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        """Return each slot's scripted actions, mixed with random ones; `explore` is not used."""
        actions = random_actions(tick.observation.avail_actions, self._rng, self._env.info.box)
        chance = self._rng.random(actions.shape[:2]) < self._share[:, None]
        for number in np.unique(self._script[tick.active]):
            if self.policies[number] != RANDOM:
                scripted = self._env.scripted_actions(self.policies[number], self._rng)
                follow = (self._script == number)[:, None] & ~chance
                actions = np.where(follow.reshape(*follow.shape, *[1] * (actions.ndim - 2)), scripted, actions)
        return Decision(actions)

    def refresh(self) -> None:
        """Do nothing: scripts have no weights."""

    def snapshot(self) -> dict[str, Any]:
        """Return each slot's script and share."""
        return {"script": self._script.copy(), "share": self._share.copy()}

    def load_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Restore a `snapshot`."""
        self._script, self._share = snapshot["script"].copy(), snapshot["share"].copy()
