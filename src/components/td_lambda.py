"""TD(lambda) targets on packed episodes."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from omagd.utils.packing import Packing


def td_lambda_targets(
    reward: Tensor, terminated: Tensor, values: Tensor, packing: Packing, gamma: float, td_lambda: float
) -> Tensor:
    """Return the lambda-return of every step taken, [S]; closing rows hold 0.

    G(t) = r(t) + gamma (1 - terminated(t)) ((1 - lambda) v(t+1) + lambda G(t+1)), with G = v on the closing row: each
    episode's recursion starts at its own last step, which bootstraps from its closing row unless it was terminal.

    reward, terminated: [S], what followed the action of each row. values: [S], value of what was seen in each row.
    """
    sizes = [*packing.batch_sizes, 0]
    starts = [0, *accumulate(sizes)]
    keep = gamma * (1.0 - terminated)
    ahead = values.clone()
    targets = torch.zeros_like(values)
    for t in range(packing.n_steps - 2, -1, -1):
        going, here, following = sizes[t + 1], starts[t], starts[t + 1]
        rows = slice(here, here + going)
        next_rows = slice(following, following + going)
        targets[rows] = reward[rows] + keep[rows] * ahead[next_rows]
        # `ahead` of a row becomes the mix of its value and its return once a step was taken from it.
        ahead[rows] = torch.lerp(values[rows], targets[rows], td_lambda)
    return targets
