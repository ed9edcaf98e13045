"""Recording of running episodes, in arrays that are allocated once and reused."""

from __future__ import annotations

import numpy as np
import torch

from omagd.components.episode_codec import Spec
from omagd.config.env_info import EnvInfo
from omagd.envs.protocol import Observation, StepResult
from omagd.utils.packing import Episode

SEEN = ("obs", "state", "avail_actions", "full_obs")
"""Fields of observations."""

FOLLOWED = ("actions", "reward", "terminated", "agent_reward")
"""Fields of actions and their results: zero in closing rows."""


def row_fields(info: EnvInfo, full_obs: bool) -> Spec:
    """Return the fields of an episode's rows, without those that a policy adds: (type, shape) by name."""
    n, obs = info.n_agents, (torch.float32, (info.n_agents, info.obs_dim))
    fields: Spec = {
        "obs": obs,
        "state": (torch.float32, (info.state_dim,)),
        "avail_actions": (torch.uint8, (n, info.n_actions)),
        "actions": (torch.uint8 if info.n_actions <= 255 else torch.int16, (n,)),
        "reward": (torch.float32, ()),
        "terminated": (torch.uint8, ()),
    }
    if info.agent_rewards:
        fields["agent_reward"] = (torch.float32, (n,))
    return {**fields, "full_obs": obs} if full_obs else fields


class Recorder:
    """Fields [B, episode_limit + 1, ...] of the running episodes, copied out one episode at a time.

    Args:
        info: sizes. n_slots: B. full_obs: whether to record `full_obs`.
    """

    def __init__(self, info: EnvInfo, n_slots: int, full_obs: bool) -> None:
        self._rows = (n_slots, info.episode_limit + 1)
        self._fields = {
            name: np.zeros((*self._rows, *shape), torch.empty(0, dtype=dtype).numpy().dtype)
            for name, (dtype, shape) in row_fields(info, full_obs).items()
        }
        self._own = tuple(self._fields)
        self._seen = tuple(name for name in SEEN if name in self._fields)
        self._followed = tuple(name for name in FOLLOWED if name in self._fields)
        self._begun = False
        self._flat: dict[str, np.ndarray] = {}
        self._flatten()

    def _flatten(self) -> None:
        """Update the views [B * (episode_limit + 1), ...] of all fields: one index is faster than two."""
        self._flat = {name: field.reshape(-1, *field.shape[2:]) for name, field in self._fields.items()}

    def begin(self) -> None:
        """Accept another policy, whose own fields may differ."""
        self._begun = False

    def record_observations(self, slots: np.ndarray, steps: np.ndarray, seen: Observation) -> None:
        """Write the observations of the slot numbers `slots` at their `steps`."""
        rows, pick = slots * self._rows[1] + steps, self._pick(slots)
        for name in self._seen:
            self._flat[name][rows] = getattr(seen, name)[pick]

    def _pick(self, slots: np.ndarray) -> np.ndarray | slice:
        """Return the index of `slots` into [B, ...]; a slice, which copies nothing, for all slots."""
        return slots if len(slots) < self._rows[0] else slice(None)

    def record_actions(
        self, slots: np.ndarray, steps: np.ndarray, actions: np.ndarray, extras: dict[str, np.ndarray]
    ) -> None:
        """Write the `actions` [B, n] and the policy's own fields (name -> [B, ...]) of `slots` at their `steps`."""
        if not self._begun:
            self._allocate(extras)
        rows, pick = slots * self._rows[1] + steps, self._pick(slots)
        self._flat["actions"][rows] = actions[pick]
        for name, value in extras.items():
            self._flat[name][rows] = value[pick]

    def _allocate(self, extras: dict[str, np.ndarray]) -> None:
        """Allocate an array for each of the policy's fields, or reuse one that fits."""
        for name in extras:
            if name in self._own:
                raise ValueError(f"the policy may not store a field called {name}")
        old = self._fields
        self._fields = {name: old[name] for name in self._own}
        for name, value in extras.items():
            kept = old.get(name)
            if kept is None or kept.shape[2:] != value.shape[1:] or kept.dtype != value.dtype:
                kept = np.zeros((*self._rows, *value.shape[1:]), value.dtype)
            self._fields[name] = kept
        self._flatten()
        self._begun = True

    def record_results(self, slots: np.ndarray, steps: np.ndarray, result: StepResult) -> None:
        """Write rewards and terminal flags of the steps that `slots` took at their `steps`."""
        rows = slots * self._rows[1] + steps
        self._flat["reward"][rows] = result.reward[slots]
        self._flat["terminated"][rows] = result.terminated[slots] & ~result.truncated[slots]
        if result.agent_reward is not None and "agent_reward" in self._own:
            self._flat["agent_reward"][rows] = result.agent_reward[slots]

    def take(self, slot: int, length: int) -> Episode:
        """Return a copy of the episode of `length` steps in `slot`: tensors [length + 1, ...] by name."""
        for name in self._followed:
            self._fields[name][slot, length] = 0
        return {name: torch.from_numpy(field[slot, : length + 1].copy()) for name, field in self._fields.items()}

    def latest(self, slots: np.ndarray, steps: np.ndarray) -> list[Episode]:
        """Return the steps that led to the rows `steps` (> 0) of `slots`, each as an episode of two rows."""
        rows = slots * self._rows[1] + steps
        pairs = {name: torch.from_numpy(flat[np.stack([rows - 1, rows], 1)]) for name, flat in self._flat.items()}
        for name in self._followed:
            pairs[name][:, 1] = 0
        return [{name: both[i] for name, both in pairs.items()} for i in range(len(slots))]

    def snapshot(self, n_steps: int) -> dict[str, np.ndarray]:
        """Return the first `n_steps` rows of every slot, name -> [B, n_steps, ...]."""
        return {name: field[:, :n_steps].copy() for name, field in self._fields.items()}

    def restore(self, snapshot: dict[str, np.ndarray]) -> None:
        """Restore the rows of a `snapshot`."""
        self._allocate({name: rows[:, 0] for name, rows in snapshot.items() if name not in self._own})
        for name, rows in snapshot.items():
            self._fields[name][:, : rows.shape[1]] = rows
