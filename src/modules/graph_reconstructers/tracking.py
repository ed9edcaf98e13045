"""Stage 3 with `kind: tracker`: carries the beliefs of the frozen tracker through the episodes of all battle slots.

At each step: remember what is seen, advance the state of every unit, decode the missing ones, and write them where
nothing was seen; seen features pass bit for bit. As with the masked predictor the result is rounded and stored with the
step, and agents act on the stored values.
Shapes: B slots, P active ones, n agents, N nodes, D features, M missing nodes, H hidden units of a node.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.graph_reconstructers.reconstructor import Reconstruction, Reconstructor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.modules.graph_reconstructers.tracker import Memory, Tracker
from omagd.modules.ops import PackedGRU, is_only
from omagd.utils.compiling import compiled_or_reference

if TYPE_CHECKING:
    from omagd.modules.graph_reconstructers.compiled_tracking import CompiledTracking

STATE = ("last", "age", "own", "drift", "hidden")


class TrackingReconstructor(Reconstructor):
    """Predicts what agents do not see, from what they have seen and from the beliefs that they carry.

    Args:
        tokenizer: not read. predictor: trained; it is frozen and put into eval mode in place. config, info: of the run
            and of an environment with a layout.
    """

    shape_keys = ("kind", "d_model", "feedforward_dim")
    training_fields = ("obs", "full_obs", "actions")
    pretraining = ("stage2",)

    def __init__(self, tokenizer: Tokenizer | None, predictor: Tracker, config: Config, info: EnvInfo) -> None:
        assert info.layout is not None
        super().__init__(info.layout, predictor.scale.device)
        self.predictor, self.n_agents = predictor.eval().requires_grad_(False), info.n_agents
        self._weights = [*predictor.parameters(), *predictor.buffers()]
        self._compiled: tuple[tuple[int, int], CompiledTracking] | None = None
        self.begin(0)

    @classmethod
    def new_predictor(cls, config: Config, info: EnvInfo) -> Tracker:
        """Return an untrained tracker."""
        return Tracker(config.mask_predictor_config, info)

    def begin(self, n_slots: int) -> None:
        """Start with empty memories in `n_slots` slots, and with the current weights."""
        shape, kind = (n_slots, self.n_agents, self.layout.n_nodes), self.predictor.scale.dtype
        others = (*shape[:2], shape[2] - 1, self.predictor.config.d_model)
        self._state: dict[str, Tensor] = {
            "last": torch.zeros((*shape, self.layout.node_dim), device=self.device),
            "age": torch.full(shape, -1, device=self.device),
            "own": torch.zeros((*shape[:2], self.layout.node_dim), device=self.device),
            "drift": torch.zeros((*shape, 2), dtype=kind, device=self.device),
            "hidden": torch.zeros(others, dtype=kind, device=self.device),
        }  # fmt: skip

    @torch.inference_mode()
    def reset(self, which: np.ndarray) -> None:
        """Clear the memories of the slots `which` [B] bool, where episodes start."""
        slots = torch.as_tensor(which, device=self.device)
        for name, value in self._state.items():
            value[slots] = -1 if name == "age" else 0

    def _fill(self, obs: Tensor, now: Tensor, played: Tensor, actions: Tensor) -> Reconstruction:
        if self.has_kernels and (kernels := compiled_tracking()) is not None:
            return self._by_kernels(kernels, obs, now, played, actions)
        if played.all():
            result, self._state = self._tick(obs, now, actions, self._state)
            return result
        slots = played.nonzero().flatten()
        part = {name: value[slots] for name, value in self._state.items()}
        made, part = self._tick(obs[slots], now[slots], actions[slots], part)
        for name, value in part.items():
            self._state[name][slots] = value
        return made.among(obs, slots)

    def snapshot(self) -> dict[str, Tensor]:
        """Return the memories of all slots."""
        return {name: value.clone() for name, value in self._state.items()}

    @torch.inference_mode()
    def load_snapshot(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of as many slots."""
        self._state = {name: snapshot[name].to(self.device).clone() for name in STATE}

    @property
    def has_kernels(self) -> bool:
        """Whether `compiled_tracking.py` computes the same."""
        here = self.device.type == "cpu" and self.predictor.scale.dtype == torch.float32
        return here and is_only(self.predictor, Tracker, nn.Linear, nn.Embedding, PackedGRU)

    def _by_kernels(
        self, kind: type[CompiledTracking], obs: Tensor, now: Tensor, played: Tensor, actions: Tensor
    ) -> Reconstruction:
        """Return the result of `step`, computed by kernels: the same up to rounding."""
        version = len(obs), sum(value._version for value in self._weights)
        if self._compiled is None or version != self._compiled[0]:
            self._compiled = version, kind(self.layout, self.predictor, len(obs))
        filled = np.array(obs.numpy(), np.float32, order="C")  # a copy
        taken = actions.long().contiguous().numpy()
        given = filled, now.contiguous().numpy(), played.nonzero().flatten().numpy(), taken
        stored, guessed = self._compiled[1](*given, self._state)
        fields = {self.field: torch.from_numpy(stored)}
        return Reconstruction(fields, torch.from_numpy(filled), torch.from_numpy(guessed))

    def _tick(
        self, obs: Tensor, now: Tensor, actions: Tensor, state: dict[str, Tensor]
    ) -> tuple[Reconstruction, dict[str, Tensor]]:
        """Return the reconstruction of obs [P, n, obs_dim] at steps `now` [P], and the state after it."""
        tracker, (seen, missing) = self.predictor, self.columns.sight(obs)
        nodes = self.columns.nodes(obs)
        memory, drift = self._remember(nodes, now, actions, seen, missing, state)
        out, hidden = tracker.step(memory, drift, state["hidden"])
        after = {"last": memory.last, "age": memory.age, "own": nodes[:, :, 0], "drift": drift, "hidden": hidden}
        belief = tracker.belief(out, memory.age, missing)
        guesses = torch.zeros_like(nodes)
        guesses[missing] = belief.features
        return self.made(obs, self.columns.obs(guesses).half(), missing), after

    def _remember(
        self, nodes: Tensor, now: Tensor, actions: Tensor, seen: Tensor, missing: Tensor, state: dict[str, Tensor]
    ) -> tuple[Memory, Tensor]:
        """Return what agents know after looking at nodes [P, n, N, D], and the drift [P, n, N, 2] of each unit."""
        never = state["age"] < 0
        age = torch.where(seen, 0, torch.where(never, -1, state["age"] + 1))
        last = torch.where(seen[..., None], nodes, state["last"])
        # At the start of an episode this is no change, but nothing has been seen before, so no drift counts it.
        memory = Memory(last, age, actions, nodes[:, :, 0] - state["own"], now, missing)
        drift = torch.where((age > 0)[..., None], state["drift"] + self.predictor.moves(memory)[:, :, None], 0.0)
        return memory, drift


@lru_cache(maxsize=1)
def compiled_tracking() -> type[CompiledTracking] | None:
    """Return the class that computes a tick by kernels, None where Numba is missing."""

    def load() -> type[CompiledTracking] | None:
        from omagd.modules.graph_reconstructers.compiled_tracking import CompiledTracking

        return CompiledTracking

    return compiled_or_reference(load, None)
