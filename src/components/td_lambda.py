"""TD(lambda) targets on packed episodes."""

from __future__ import annotations

import torch
from torch import Tensor

from omagd.utils.packing import Packing


def td_lambda_targets(
    reward: Tensor, terminated: Tensor, values: Tensor, packing: Packing, gamma: float, td_lambda: float
) -> Tensor:
    """Return the lambda-return of every step taken, [S]; closing rows hold 0.

    G(t) = r(t) + gamma (1 - terminated(t)) ((1 - lambda) v(t+1) + lambda G(t+1)), with G = v on the closing row: each
    episode's recursion starts at its own last step, which bootstraps from its closing row unless it was terminal.

    reward, terminated: [S], what followed the action of each row. values: [S], value of what was seen in each row. Or
    all with agents behind: [S, n] values, reward and terminated broadcast to them.
    """
    sizes = packing.batch_sizes
    keep = gamma * (1.0 - terminated)
    closing = packing.closing.to(values.device).view(-1, *[1] * (values.dim() - 1))
    # Of every row: where its episode's next row stands (closing rows have none and are put right below).
    following = (torch.arange(len(packing.step)) + torch.tensor(sizes)[packing.step]).clamp_(max=len(values) - 1)
    targets = torch.where(closing, values, reward + (1.0 - td_lambda) * keep * values[following.to(values.device)])
    coming = td_lambda * keep.expand_as(targets)
    steps = list(zip(targets.split(sizes), coming.split(sizes), strict=True))
    ahead = steps.pop()[0]
    for here, share in reversed(steps):
        here[: len(ahead)].addcmul_(share[: len(ahead)], ahead)
        ahead = here
    return targets.masked_fill_(closing, 0)
