"""Small helpers on action masks that every environment shares."""

from __future__ import annotations

import numpy as np


def random_actions(avail_actions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return [..., n] int64 actions, each drawn uniformly from the available ones of `avail_actions` [..., n, A]."""
    return np.where(avail_actions, rng.random(avail_actions.shape), -1.0).argmax(-1)


def require_available(name: str, avail_actions: np.ndarray, actions: np.ndarray, active: np.ndarray) -> None:
    """Raise ValueError unless every action of the active slots is available.

    avail_actions: [B, n, A] bool. actions: [B, n] int. active: [B] bool.
    """
    n_actions = avail_actions.shape[-1]
    inside = (actions >= 0) & (actions < n_actions)
    chosen = np.take_along_axis(avail_actions, np.clip(actions, 0, n_actions - 1)[..., None], -1)[..., 0]
    wrong = np.argwhere(~(inside & chosen) & active[:, None])
    if len(wrong):
        slot, agent = (int(v) for v in wrong[0])
        raise ValueError(f"{name}: slot {slot}, agent {agent}: action {int(actions[slot, agent])} is not available")
