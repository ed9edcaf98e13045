"""Helpers on action masks, used by all environments."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def random_actions(avail_actions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return [..., n] int64 actions, each drawn uniformly from the available ones of `avail_actions` [..., n, A]."""
    return np.where(avail_actions, rng.random(avail_actions.shape), -1.0).argmax(-1)


@lru_cache(maxsize=64)
def _first_actions(n_slots: int, n_agents: int, n_actions: int) -> np.ndarray:
    """Return [B, n], the index of each agent's action 0 in a flattened mask."""
    return n_actions * np.arange(n_slots * n_agents).reshape(n_slots, n_agents)


def require_available(name: str, avail_actions: np.ndarray, actions: np.ndarray, active: np.ndarray) -> None:
    """Raise ValueError unless every action of the active slots is available.

    avail_actions: [B, n, A] bool. actions: [B, n] int. active: [B] bool.
    """
    if len(actions) == 1:  # one slot, as in a worker process: faster without NumPy
        _require_alone(name, avail_actions[0], actions[0].tolist(), bool(active[0]))
        return
    allowed = avail_actions.reshape(-1).take(_first_actions(*avail_actions.shape) + actions, mode="clip")
    allowed &= actions.astype(np.uint64) < avail_actions.shape[-1]  # negative numbers become huge ones
    if allowed.all():
        return
    wrong = np.argwhere(~allowed & active[:, None])
    if len(wrong):
        slot, agent = (int(v) for v in wrong[0])
        raise ValueError(f"{name}: slot {slot}, agent {agent}: action {int(actions[slot, agent])} is not available")


def _require_alone(name: str, mask: np.ndarray, chosen: list[int], active: bool) -> None:
    """`require_available` for one slot: mask [n, A] bool, chosen actions of n agents."""
    n_actions = mask.shape[1]
    for agent, action in enumerate(chosen):
        if active and not (0 <= action < n_actions and mask[agent, action]):
            raise ValueError(f"{name}: slot 0, agent {agent}: action {action} is not available")
