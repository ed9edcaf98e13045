"""TD(lambda) targets on packed episodes."""

from __future__ import annotations

import torch
from torch import Tensor

from omagd.utils.packing import FixedPacking, PackedBatch, Packing


def rewards_of_agents(batch: PackedBatch) -> Tensor:
    """Return the agents' own rewards [S, n] where the environment gives them, else the team's, [S, 1]."""
    return batch["agent_reward"] if "agent_reward" in batch else batch["reward"].unsqueeze(-1)


def batch_targets(values: Tensor, batch: PackedBatch, gamma: float, td_lambda: float) -> Tensor:
    """Return the lambda-returns of every row of a batch: of the team, or of each agent from `rewards_of_agents`.

    values: [S], the team's, or [S, n], one per agent. Returns their shape and type.
    """
    reward, terminated = batch["reward"], batch["terminated"].to(values.dtype)
    if values.dim() > 1:
        reward, terminated = rewards_of_agents(batch), terminated.unsqueeze(-1)
    return td_lambda_targets(reward.to(values.dtype), terminated, values, batch.packing, gamma, td_lambda)


def td_lambda_targets(
    reward: Tensor, terminated: Tensor, values: Tensor, packing: Packing, gamma: float, td_lambda: float
) -> Tensor:
    """Return the lambda-return of every step, [S]; closing rows hold 0.

    G(t) = r(t) + gamma (1 - terminated(t)) ((1 - lambda) v(t+1) + lambda G(t+1))   (Sutton and Barto 2018, eq. 12.18)

    with G = v in the closing row, so that an episode that was cut off bootstraps from its last observation.

    reward, terminated: [S], what followed the action of each row. values: [S], v of the observation in each row. With
    one value per agent, values are [S, n], and reward and terminated broadcast to them.
    """
    keep = gamma * (1.0 - terminated)
    closing = packing.closing.to(values.device, non_blocking=True).view(-1, *[1] * (values.dim() - 1))
    if isinstance(packing, FixedPacking):
        later = values.roll(-packing.n_episodes, 0)  # v(t+1)
    else:
        later = values[packing.next_row.to(values.device, non_blocking=True)]
    targets = torch.where(closing, values, reward + (1.0 - td_lambda) * keep * later)
    weight = td_lambda * keep  # of G(t+1) in G(t)
    if isinstance(packing, FixedPacking):
        weight = weight.masked_fill(closing, 0).expand_as(targets)
        return torch.where(closing, 0, _by_shifting(targets, weight, packing))
    sums = _step_by_step if values.device.type == "cpu" else by_doubling
    return sums(targets, weight.expand_as(targets), packing).masked_fill_(closing, 0)


def _step_by_step(targets: Tensor, weight: Tensor, packing: Packing) -> Tensor:
    """Return G(t) = targets(t) + weight(t) G(t+1), from the last step back; `targets` is overwritten."""
    steps = list(zip(targets.split(packing.batch_sizes), weight.split(packing.batch_sizes), strict=True))
    later = steps.pop()[0]
    for now, share in reversed(steps):  # episodes that are longer come first in each block
        now[: len(later)].addcmul_(share[: len(later)], later)
        later = now
    return targets


def by_doubling(targets: Tensor, weight: Tensor, packing: Packing) -> Tensor:
    """Return the same in about log2(T) rounds of a few operations, for devices on which T dependent ones take long.

    Each round doubles the number of steps that a row has summed up: with p(t) the row of the next step,
    G(t) = a(t) + w(t) G(p(t)) = a(t) + w(t) a(p(t)) + w(t) w(p(t)) G(p(p(t))) (Hillis and Steele 1986).

    targets, weight: [S, ...].
    """
    after = packing.next_row.to(targets.device, non_blocking=True)
    closing = packing.closing.to(targets.device, non_blocking=True).view(-1, *[1] * (targets.dim() - 1))
    weight = weight.masked_fill(closing, 0)
    for _ in range((packing.n_steps - 1).bit_length()):
        targets = torch.addcmul(targets, weight, targets[after])
        weight, after = weight * weight[after], after[after]
    return targets


def _by_shifting(targets: Tensor, weight: Tensor, packing: FixedPacking) -> Tensor:
    """Return the same as `by_doubling` where the next row of each row is B rows later: shifts replace its look-ups.

    targets, weight: [S, ...]; weight is 0 in closing rows and their repetitions, of which row T is always one.
    """
    reach, n = 1, packing.n_episodes
    while reach < packing.n_steps:
        shift = reach * n
        targets = torch.cat([torch.addcmul(targets[:-shift], weight[:-shift], targets[shift:]), targets[-shift:]])
        weight = torch.cat([weight[:-shift] * weight[shift:], weight[-shift:]])  # the last ones are 0 by now
        reach *= 2
    return targets
