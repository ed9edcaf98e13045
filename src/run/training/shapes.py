"""Shapes of what the networks of plug-ins return: another one would be broadcast, or fail far from its cause.

Shapes: S rows, B slots, n agents, A actions, H hidden units.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.modules.agents.agent import Agent, AgentInputs
from omagd.utils.errors import UserError
from omagd.utils.plugins import is_plugin, owner_of


def try_networks(learner: Any, agent: Agent, info: EnvInfo) -> None:
    """Run a learner's discarded passes and a step of its agent; check what networks of plug-ins return.

    Errors: UserError for another shape, and for parameters without a gradient; those of the networks themselves.
    """
    modules = {part for module in learner.modules().values() for part in module.modules()}
    hooks = [part.register_forward_hook(partial(_check, info)) for part in modules if is_plugin(type(part))]
    try:
        learner.warm_up()
    finally:
        for hook in hooks:
            hook.remove()
    if is_plugin(type(agent)):
        _check_step(agent, info)


def _check_step(agent: Agent, info: EnvInfo) -> None:
    """Check what acting calls: `init_hidden` returns [B, n, H], and `step` [B, n, A] and [B, n, H]."""
    owner, like = owner_of(type(agent)), next(agent.parameters())
    with torch.no_grad():
        hidden = agent.init_hidden(2)
        _require(owner, "init_hidden(2)", hidden, (2, info.n_agents, -1))
        returned: Any = agent.step(AgentInputs.blank(2, info, like), hidden)
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise UserError(f"{owner}: step returned {_said(returned)}, not values and hidden states")
    _require(owner, "values of step", returned[0], (2, info.n_agents, info.n_actions))
    _require(owner, "hidden states of step", returned[1], tuple(hidden.shape))


def _check(info: EnvInfo, module: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
    owner = owner_of(type(module))
    kind = owner.partition("=")[0]
    if kind == "agent" and given:
        _require(owner, "forward", returned, (*given[0].features.shape[:2], info.n_actions))
    elif kind in {"mixer", "critic"} and given:
        rows = len(getattr(given[0], "state", given[-1]))
        _require(owner, "forward", returned, (rows,), (rows, info.n_agents))


def _require(owner: str, what: str, found: Any, *shapes: tuple[int, ...]) -> None:
    """Require a tensor of one of some shapes; -1 stands for any size."""
    for shape in shapes if isinstance(found, Tensor) else ():
        if len(shape) == found.dim() and all(a in (-1, b) for a, b in zip(shape, found.shape, strict=True)):
            return
    raise UserError(f"{owner}: {what} returned {_said(found)}, not {' or '.join(map(_text, shapes))}")


def _said(found: Any) -> str:
    return _text(found.shape) if isinstance(found, Tensor) else type(found).__name__


def _text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('H' if size == -1 else str(size) for size in shape)}]"
