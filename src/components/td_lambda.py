"""TD(lambda) targets on packed episodes."""

from __future__ import annotations

import torch
from torch import Tensor

from omagd.utils.packing import Packing


def td_lambda_targets(
    reward: Tensor, terminated: Tensor, values: Tensor, packing: Packing, gamma: float, td_lambda: float
) -> Tensor:
    """Return the lambda-return of every step, [S]; closing rows hold 0.

    G(t) = r(t) + gamma (1 - terminated(t)) ((1 - lambda) v(t+1) + lambda G(t+1))   (Sutton and Barto 2018, eq. 12.18)

    with G = v in the closing row, so that an episode that was cut off bootstraps from its last observation.

    reward, terminated: [S], what followed the action of each row. values: [S], v of the observation in each row. With
    one value per agent, values are [S, n], and reward and terminated broadcast to them.
    """
    sizes = packing.batch_sizes
    keep = gamma * (1.0 - terminated)
    closing = packing.closing.to(values.device).view(-1, *[1] * (values.dim() - 1))
    # Index of v(t+1) for the row of v(t): rows are packed by time, so it stands one block later. Closing rows have no
    # next row; their index is clamped and their value replaced.
    following = (torch.arange(len(packing.step)) + torch.tensor(sizes)[packing.step]).clamp_(max=len(values) - 1)
    targets = torch.where(closing, values, reward + (1.0 - td_lambda) * keep * values[following.to(values.device)])
    weight = td_lambda * keep.expand_as(targets)  # of G(t+1) in G(t)
    steps = list(zip(targets.split(sizes), weight.split(sizes), strict=True))
    later = steps.pop()[0]
    for now, share in reversed(steps):  # episodes that are longer come first in each block
        now[: len(later)].addcmul_(share[: len(later)], later)
        later = now
    return targets.masked_fill_(closing, 0)
