"""Environments whose episodes live in a device's memory: what `runner=resident` plays.

Shapes: B slots, n agents, A actions.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class Seen(NamedTuple):
    """What is shown: avail [B, n, A] bool; obs, full [B, n, obs_dim], state [B, state_dim] float32."""

    avail: Tensor
    obs: Tensor
    full: Tensor
    state: Tensor


class Outcome(NamedTuple):
    """Results of a step, on the device; zero where no step was played. All are overwritten by the next step.

    Attributes:
        reward: [B] float32. over: [B] bool. truncated: [B] bool, over only because of the step limit, and the target
            bootstraps. won, draw, limit: [B] bool. dead: [2, B] int64, allies and enemies.
    """

    reward: Tensor
    over: Tensor
    truncated: Tensor
    won: Tensor
    draw: Tensor
    limit: Tensor
    dead: Tensor

    def results(self) -> dict[str, Tensor]:
        """Return the results of episodes by the names of `StepResult.info`, [B] each."""
        allies, enemies = self.dead
        return {
            "battle_won": self.won, "battle_draw": self.draw, "episode_limit": self.limit, "dead_allies": allies,
            "dead_enemies": enemies,
        }  # fmt: skip


class ResidentGame(Protocol):
    """Episodes in B slots of one device. The tensors that it returns stay where they are from call to call.

    Call `observe` before each `step`. No call reads a value of the device.

    Attributes:
        device: of all tensors. n_slots: B. results: names of the results that episodes have.
        faults: [B] bool, slots that were given an action that was not available since it was last set to zero.
        capturable: a CUDA graph can hold all calls; otherwise they run between graphs.
    """

    device: torch.device
    n_slots: int
    results: tuple[str, ...]
    faults: Tensor
    capturable: bool

    def reset(self, which: Tensor, seeds: Tensor) -> None:
        """Start new episodes in the slots `which` [B] bool, slot b from `seeds[b]` (int64 ≥ 0)."""

    def step(self, actions: Tensor, active: Tensor) -> Outcome:
        """Play `actions` [B, n] int64 in the slots `active` [B] bool; the other slots do not change."""

    def observe(self, full: bool = False) -> Seen:
        """Return masks, observations and state, and `full` observations if asked."""


@runtime_checkable
class CanBeResident(Protocol):
    """A batched environment whose episodes can be played on a device, with the same results."""

    @staticmethod
    def why_not_resident(args: Any, on_gpu: bool) -> str:
        """Return why these arguments cannot be played on the CPU or a GPU, and the fix; empty if they can."""

    def resident(self, device: torch.device) -> ResidentGame:
        """Return episodes of the same arguments and number of slots on a device."""
