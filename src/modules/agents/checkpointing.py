"""Long episodes with little memory: the activations of some steps at a time are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from omagd.modules.agents.inputs import AgentInputs
from omagd.utils.packing import Packing

STEPS_AT_ONCE = 10
Run = Callable[[AgentInputs, Packing, Tensor], tuple[Tensor, Tensor]]


def unroll(run: Run, inputs: AgentInputs, packing: Packing, start: Tensor, checkpointing: bool) -> Tensor:
    """Return the values [S, n, A] of `run`; with `checkpointing`, `STEPS_AT_ONCE` time steps after one another.

    run: from inputs, packing and the hidden state before the first step [B, n, H] to the values of all rows and the
        hidden state after the last step. start: where episodes start.
    """
    if not checkpointing or not torch.is_grad_enabled():
        return run(inputs, packing, start)[0]
    values, first = [], 0
    for begin in range(0, packing.n_steps, STEPS_AT_ONCE):
        part = Packing(tuple(min(k - begin, STEPS_AT_ONCE) for k in packing.lengths if k > begin))
        rows = slice(first, first + sum(part.lengths))
        guessed = None if inputs.guessed is None else inputs.guessed[rows]
        chosen = AgentInputs(inputs.features[rows], inputs.last_action[rows], guessed)
        made, start = checkpoint(run, chosen, part, start[: part.n_episodes], use_reentrant=False)
        values.append(made)
        first = rows.stop
    return torch.cat(values)
