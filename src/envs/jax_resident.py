"""Environments that JAX plays, in a device's memory: JAX plays, torch reads and writes the same memory by DLPack.

JAX and torch each have a stream on a GPU. Each exchange orders them on the device, and the host does not wait: the
reader hands its stream to `__dlpack__`, and the writer makes that stream wait for the values (Python array API
standard, "stream" of `__dlpack__`; both libraries follow it). A JAX array that torch reads is kept until JAX has been
given its next tensor from torch, which follows the reading: only then may JAX use the memory again. No CUDA graph can
hold JAX's part. On a CPU JAX works in other threads, so its results are waited for.

Shapes: B slots, n agents, A actions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omagd.envs.protocol import Outcome, Seen

WORD = (1 << 32) - 1


class ResidentJax:
    """Episodes of a `JaxEnv` on one device, by the same compiled functions: see `ResidentGame`.

    Args:
        env: whose program and facts these are. n_slots: B. device: cpu or cuda, where JAX plays too.
    """

    results: tuple[str, ...]
    capturable: bool = False

    def __init__(self, env: Any, n_slots: int, device: torch.device) -> None:
        self.device, self.n_slots = device, n_slots
        self._program, info, self._scale = env._program, env.info, env.reward_scale
        self._own, self.results = env.results, (*env.results, "episode_limit")
        self._jax = self._program.jax

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
        self._outcome = Outcome(zeros(dtype=real), over, truncated, won, draw, limit, dead, zeros(dtype=real))
        self.faults, self._which, self._active = (zeros(dtype=yes) for _ in range(3))
        self._words, self._chosen = zeros(2, dtype=torch.int32), zeros(info.n_agents, dtype=torch.int32)
        where, bits = self._jax.numpy.where, self._jax.lax.bitcast_convert_type
        unsigned = self._jax.numpy.uint32
        self._rekey = self._jax.jit(lambda old, words, which: where(which[:, None], bits(words, unsigned), old))
        self._held: list[Any] = []
        (place,) = self._to_jax(self._words).devices()
        self._state = self._jax.device_put(self._program.blank(n_slots), place)
        self._keys = self._jax.device_put(self._jax.numpy.zeros((n_slots, 2), unsigned), place)
        self._view: dict[str, Tensor] | None = None  # in JAX's memory

    def reset(self, which: Tensor, seeds: Tensor) -> None:
        """Start new episodes in the slots `which` [B] bool, slot b from `seeds[b]` (int64 ≥ 0)."""
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
        self._state, found = self._done(self._program.advance(self._state, self._keys, *given))
        del held  # JAX has what torch wrote after reading these
        self._view = None
        found, out = {name: self._to_torch(value) for name, value in found.items()}, self._outcome
        out.reward.copy_(torch.where(active, found["reward"] * self._scale, 0.0))
        out.over.copy_(active & found["over"])
        out.truncated.copy_(active & found["truncated"])
        out.limit.copy_(out.truncated)
        places = out.results()
        for name in self._own:
            places[name].copy_(out.over * found[name])
        return out

    def observe(self, full: bool = False) -> Seen:
        """Return masks, observations and state, and `full` observations if asked; the next call overwrites them."""
        if self._view is None:
            found = self._done(self._program.view(self._state))
            self._view = {name: self._to_torch(found[name]) for name in ("obs", "full", "state", "avail")}
        view, seen = self._view, self._seen
        seen.avail.copy_(view["avail"])
        seen.obs.copy_(view["obs"])
        seen.state.copy_(view["state"])
        if full:
            seen.full.copy_(view["full"])
        return seen

    def _done(self, values: Any) -> Any:
        """Return JAX's `values`, on a CPU once they are computed."""
        return self._jax.block_until_ready(values) if self.device.type == "cpu" else values

    def _to_jax(self, tensor: Tensor) -> Any:
        return self._jax.dlpack.from_dlpack(tensor)

    def _to_torch(self, array: Any) -> Tensor:
        self._held.append(array)
        return torch.from_dlpack(array)
