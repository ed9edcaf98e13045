"""Action selectors: choose one available action for each agent from the agent's outputs for all actions."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.utils.errors import UserError
from omagd.utils.registry import Registry
from omagd.utils.seeding import uniform

REGISTRY: Registry[type] = Registry(
    "action_selector",
    "omagd.action_selectors",
    lazy={
        "gaussian": "omagd.components.gaussian:Gaussian",
        "tanh_gaussian": "omagd.components.gaussian:TanhGaussian",
    },
    protocol="omagd.components.action_selectors:protocol_of",
)


LOG_PROB = "log_prob"
"""The field with the log-probability of each action that was drawn, [S, n] float32."""


class Selector(Protocol):
    """Chooses actions by the agent's outputs."""

    def __init__(self) -> None: ...

    def select(
        self, q: np.ndarray, available: np.ndarray, epsilon: float, rng: np.random.Generator | None
    ) -> np.ndarray:
        """Return [B, n] int64; shapes as in `Greedy`."""


class DrawingSelector(Protocol):
    """Draws actions from the agent's outputs, which are logits: its class sets `draws = True`."""

    def __init__(self) -> None: ...

    def choose(
        self, q: np.ndarray, available: np.ndarray, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return [B, n] int64, and the log-probabilities [B, n] float32; the likeliest action without `rng`."""


Chosen = tuple[Tensor, dict[str, Tensor]]
"""Actions [B, n] int64, and what is recorded beside them, as `BasicMAC.extra_fields` names it, [B, n]."""


class SelectorOnDevice(Protocol):
    """Chooses on a device too (`runner=resident`): a class whose own method this is, not one that inherits it."""

    def on_device(self, q: Tensor, available: Tensor, epsilon: Tensor, key: Tensor, step: Tensor) -> Chosen:
        """Return the actions; greedy where `epsilon` is negative.

        Only launches work of fixed shapes, for a CUDA graph. Random numbers are `randoms` of key and step alone, so
        that an episode does not depend on those beside it.

        q: [B, n, A]. available: [B, n, A] bool. epsilon: scalar. key: of an episode's actions, step: [B] int64.
        """


def chooses_on_device(name: str) -> bool:
    """Return whether the selector called `name` says itself how it chooses on a device."""
    return "on_device" in vars(REGISTRY.get(name))


def randoms(key: Tensor, step: Tensor, agents: int, count: int) -> Tensor:
    """Return numbers in [0, 1), [B, agents, count] float64, each one's own of the episode `key` and the `step`."""
    number = step.unsqueeze(1) * (agents * count) + torch.arange(agents * count, device=step.device)
    return uniform(number, key.unsqueeze(1)).view(-1, agents, count)


def new_selector(config: Config, info: EnvInfo) -> Any:
    """Return the configured selector; `softmax` means `gaussian` where actions are continuous.

    Errors: UserError for a selector of the other kind of actions.
    """
    name, given = config.action_selector, f"action_selector={config.action_selector}"
    if info.box is not None and name == "softmax":
        name = "gaussian"
    selector = REGISTRY.build(name)
    if hasattr(selector, "log_prob") != (info.box is not None):
        kind, fix = ("discrete", "softmax") if info.box is None else ("continuous", "gaussian")
        raise UserError(f"{given}: env={config.env} has {kind} actions. Use action_selector={fix}")
    if info.box is not None:
        if selector.squashes and not info.box.bounded:
            raise UserError(f"{given}: needs actions that are bounded on both sides. Use action_selector=gaussian")
        selector.box = info.box
    return selector


def protocol_of(found: Any) -> type:
    """Return the protocol that a selector follows."""
    return DrawingSelector if getattr(found, "draws", False) else Selector


def draws(name: str) -> bool:
    """Return whether the selector called `name` draws from logits."""
    return bool(getattr(REGISTRY.get(name), "draws", False))


@REGISTRY.register("greedy")
class Greedy:
    """The best available action, without exploration.

    Attributes:
        draws: whether the outputs are logits, from whose softmax actions are drawn. Then the selector has `choose`, as
            `Softmax` does, and the log-probabilities of the actions are stored with each row, in the field `LOG_PROB`.
    """

    draws: ClassVar[bool] = False

    def select(
        self, q: np.ndarray, available: np.ndarray, epsilon: float, rng: np.random.Generator | None
    ) -> np.ndarray:
        """Return [B, n] int64: each agent's available action with the largest value, the first one of several.

        q: [B, n, A] float. available: [B, n, A] bool; without any available action the result is 0.
        """
        return np.where(available, q, -np.inf).argmax(axis=-1)

    def on_device(self, q: Tensor, available: Tensor, epsilon: Tensor, key: Tensor, step: Tensor) -> Chosen:
        """Return the same actions on a device: see `SelectorOnDevice`."""
        return EpsilonGreedy().on_device(q, available, torch.full_like(epsilon, -1.0), key, step)


def epsilon_at(config: Config, t: int) -> float:
    """Return the share of random actions at clock `t`: an exponential fall if `epsilon_speed` is given, else a line."""
    start, finish = config.epsilon_start, config.epsilon_finish
    if config.epsilon_speed is not None:
        return max(finish, start * config.epsilon_speed**t)
    return start + (finish - start) * min(t / config.epsilon_anneal_time, 1.0)


@REGISTRY.register("epsilon_greedy")
class EpsilonGreedy(Greedy):
    """With probability epsilon, independently for each agent, a uniform available action instead of the best one.

    Every call draws two random numbers for each agent of each slot, used or not. So the stream depends only on the
    number of calls, not on living agents, active slots or available actions.
    """

    def select(
        self, q: np.ndarray, available: np.ndarray, epsilon: float, rng: np.random.Generator | None
    ) -> np.ndarray:
        """Return [B, n] int64; greedy if there is no `rng`. epsilon: share of random actions. Shapes as in `Greedy`."""
        if rng is None:
            return super().select(q, available, epsilon, rng)
        drawn = rng.random((2, *q.shape[:-1]))
        best = super().select(q, available, epsilon, None)
        explores = (drawn[0] < epsilon).nonzero()
        if len(explores[0]):
            number = available[explores].cumsum(axis=-1)  # of each available action, from 1 on
            wanted = np.floor(drawn[1][explores] * number[:, -1])
            best[explores] = (number > wanted[:, None]).argmax(axis=-1)
        return best

    def on_device(self, q: Tensor, available: Tensor, epsilon: Tensor, key: Tensor, step: Tensor) -> Chosen:
        """Choose so on a device, with two random numbers of each agent: see `SelectorOnDevice`."""
        from omagd.components.slot_kernels import choose  # loads Numba

        return choose(q, available, epsilon, key, step), {}


@REGISTRY.register("softmax")
class Softmax(Greedy):
    """An action drawn from the softmax of the agent's logits over the available actions; for on-policy learners."""

    draws = True

    def select(
        self, q: np.ndarray, available: np.ndarray, epsilon: float, rng: np.random.Generator | None
    ) -> np.ndarray:
        """Return [B, n] int64 by one random number for each agent; the likeliest action without `rng`.

        Shapes as in `Greedy`.
        """
        return self.choose(q, available, rng)[0]

    def choose(
        self, q: np.ndarray, available: np.ndarray, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the same actions, and their log-probabilities [B, n] float32."""
        log_probs = log_softmax(q, available)
        if rng is None:
            actions = super().select(q, available, 0.0, rng)
        else:
            actions = draw(np.exp(log_probs), rng.random(q.shape[:-1]))
        taken = np.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]
        return actions, taken.astype(np.float32)

    def on_device(self, q: Tensor, available: Tensor, epsilon: Tensor, key: Tensor, step: Tensor) -> Chosen:
        """Draw so on a device, with a random number of each action of each agent: see `SelectorOnDevice`."""
        logits = q.masked_fill(~(available | ~available.any(dim=-1, keepdim=True)), -torch.inf)  # as `log_softmax`
        # Logits plus Gumbel noise, -log(-log u), are largest at an action drawn from their softmax (Maddison et al.
        # 2014, "A* sampling", section 2). An unavailable one stays at -inf.
        noise = -(-randoms(key, step, *q.shape[1:]).log()).log()
        actions = (logits + noise.masked_fill(epsilon < 0, 0.0)).argmax(dim=-1)
        taken = logits.log_softmax(dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return actions, {LOG_PROB: taken.float()}


def log_softmax(logits: np.ndarray, available: np.ndarray) -> np.ndarray:
    """Return the log-softmax of [B, n, A] over the available actions, -inf for the others.

    Rows without any available action have ended; all their actions count as available.
    """
    possible = available | ~available.any(axis=-1, keepdims=True)
    shifted = np.where(possible, logits, -np.inf)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def draw(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Return [B, n] indices drawn in proportion to `weights` [B, n, A] ≥ 0, given `uniform` [B, n] in [0, 1).

    An index of weight 0 is never drawn, unless all weights are 0.
    """
    upto = weights.astype(np.float64).cumsum(axis=-1)
    return (upto > uniform[..., None] * upto[..., -1:]).argmax(axis=-1)
