"""SMAX in a device's memory: JAX plays, torch reads and writes the same memory by DLPack.

JAX and torch each have a stream on a GPU. Each exchange orders them on the device, and the host does not wait: the
reader hands its stream to `__dlpack__`, and the writer makes that stream wait for the values (Python array API
standard, "stream" of `__dlpack__`; both libraries follow it). A JAX array that torch reads is kept until JAX has been
given its next tensor from torch, which follows the reading: only then may JAX use the memory again. No CUDA graph can
hold JAX's part. On a CPU JAX works in other threads, so its results are waited for.

Shapes: B slots, n agents, m enemies, A actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omagd.envs.protocol import Outcome, Seen

if TYPE_CHECKING:
    from omagd.config.env_info import EnvInfo

WORD = (1 << 32) - 1


class ResidentSmax:
    """Battles of `SmaxEnv` on one device, by the same compiled functions: see `ResidentGame`.

    Args:
        program: compiled functions of `SmaxEnv`. info: its facts. reward_scale, continuing_episode: its arguments.
        n_slots: B. device: cpu or cuda, where JAX plays too.
    """

    results: tuple[str, ...] = ("battle_won", "dead_allies", "dead_enemies", "episode_limit")
    capturable: bool = False

    def __init__(
        self, program: Any, info: EnvInfo, n_slots: int, device: torch.device, reward_scale: float,
        continuing_episode: bool,
    ) -> None:  # fmt: skip
        self.device, self.n_slots, self._n = device, n_slots, info.n_agents
        self._scale, self._continuing = reward_scale, continuing_episode
        self._program, self._jax = program, program.jax

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((n_slots, *shape), dtype=dtype, device=device)

        yes, real = torch.bool, torch.float32
        obs = info.n_agents, info.obs_dim
        self._seen = Seen(
            zeros(info.n_agents, info.n_actions, dtype=yes), zeros(*obs, dtype=real), zeros(*obs, dtype=real),
            zeros(info.state_dim, dtype=real),
        )  # fmt: skip
        over, truncated, won, draw, limit = (zeros(dtype=yes) for _ in range(5))
        dead = torch.zeros((2, n_slots), dtype=torch.int64, device=device)
        self._outcome = Outcome(zeros(dtype=real), over, truncated, won, draw, limit, dead)
        self.faults, self._which, self._active = (zeros(dtype=yes) for _ in range(3))
        self._words, self._chosen = zeros(2, dtype=torch.int32), zeros(info.n_agents, dtype=torch.int32)
        where, bits = self._jax.numpy.where, self._jax.lax.bitcast_convert_type
        unsigned = self._jax.numpy.uint32
        self._rekey = self._jax.jit(lambda old, words, which: where(which[:, None], bits(words, unsigned), old))
        self._held: list[Any] = []
        (place,) = self._to_jax(self._words).devices()
        self._state = self._jax.device_put(program.blank(n_slots), place)
        self._keys = self._jax.device_put(self._jax.numpy.zeros((n_slots, 2), unsigned), place)
        self._view: dict[str, Tensor] | None = None

    def reset(self, which: Tensor, seeds: Tensor) -> None:
        """Start new battles in the slots `which` [B] bool, slot b from `seeds[b]` (int64 ≥ 0)."""
        self._which.copy_(which)
        self._words.copy_(torch.stack([seeds >> 32, seeds & WORD], dim=1))  # the lower 32 bits of each
        chosen = self._to_jax(self._which)
        self._keys = self._rekey(self._keys, self._to_jax(self._words), chosen)
        self._state = self._done(self._program.reset(self._state, self._keys, chosen))
        self._view = None

    def step(self, actions: Tensor, active: Tensor) -> Outcome:
        """Play `actions` [B, n] int64 in the slots `active` [B] bool; the other slots do not change."""
        self._active.copy_(active)
        self._chosen.copy_(actions)
        fits = self._seen.avail.gather(-1, actions.unsqueeze(-1)).squeeze(-1).all(dim=-1)
        self.faults.logical_or_(active & ~fits)
        held, self._held = self._held, []
        given = self._to_jax(self._chosen), self._to_jax(self._active)
        self._state, reward, done = self._done(self._program.advance(self._state, self._keys, *given))
        del held  # JAX has what torch wrote after reading these
        self._view = None
        alive, out = self._features()["alive"], self._outcome
        allies, enemies = alive[:, : self._n].sum(dim=1), alive[:, self._n :].sum(dim=1)
        out.reward.copy_(torch.where(active, self._to_torch(reward) * self._scale, 0.0))
        out.over.copy_(active & self._to_torch(done))
        both = (allies > 0) & (enemies > 0)
        out.truncated.copy_(out.over & both & self._continuing)
        out.limit.copy_(out.truncated)
        out.won.copy_(out.over & (enemies == 0) & (allies > 0))
        out.dead[0].copy_(out.over * (self._n - allies))
        out.dead[1].copy_(out.over * (self._program.m - enemies))
        return out

    def observe(self, full: bool = False) -> Seen:
        """Return masks, observations and state, and `full` observations if asked; the next call overwrites them."""
        view, seen = self._features(), self._seen
        own, others = view["own"], view["others"]
        width = others.shape[2] * others.shape[3]
        for obs in (seen.obs, seen.full) if full else (seen.obs,):
            shown = others if obs is seen.full else torch.where(view["seen"].unsqueeze(-1), others, 0.0)
            obs[..., :width].copy_(shown.flatten(2))
            obs[..., width:].copy_(own[:, : self._n])
        seen.state.copy_(own.flatten(1))
        seen.avail.copy_(view["avail"])
        return seen

    def _features(self) -> dict[str, Tensor]:
        """Return the features of the current state in JAX's memory, computed on first use."""
        if self._view is None:
            found = self._done(self._program.view(self._state))
            self._view = {name: self._to_torch(found[name]) for name in ("others", "seen", "own", "avail", "alive")}
        return self._view

    def _done(self, values: Any) -> Any:
        """Return JAX's `values`, on a CPU once they are computed."""
        return self._jax.block_until_ready(values) if self.device.type == "cpu" else values

    def _to_jax(self, tensor: Tensor) -> Any:
        return self._jax.dlpack.from_dlpack(tensor)

    def _to_torch(self, array: Any) -> Tensor:
        self._held.append(array)
        return torch.from_dlpack(array)
