"""Which prediction answers for which target: slot by slot, or the cheapest assignment within each type.

Shapes: F frames, N nodes, M masked tokens, m masked tokens of one type in one frame.
"""

from __future__ import annotations

from functools import cache
from itertools import permutations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from omagd.config.env_info import ALLY, ENEMY, EntityLayout

ENUMERATED = 4  # up to so many tokens all assignments are tried


@cache
def _orders(m: int) -> Tensor:
    return torch.tensor(list(permutations(range(m))))


def cheapest(cost: Tensor) -> Tensor:
    """Return for each of G costs [G, m (prediction), m (target)] the target of each prediction, [G, m] int64.

    The sum of the chosen costs is the smallest possible.
    """
    m = cost.shape[1]
    if m <= ENUMERATED:
        orders = _orders(m).to(cost.device)
        rows = torch.arange(m, device=cost.device)
        totals = cost[:, rows, orders].sum(-1)
        return orders[totals.argmin(-1)]
    solved = [linear_sum_assignment(one)[1] for one in cost.detach().cpu().double().numpy()]
    return torch.stack([torch.from_numpy(columns) for columns in solved]).to(cost.device)


@torch.no_grad()
def match_types(log_p: Tensor, targets: Tensor, masked: Tensor, layout: EntityLayout) -> Tensor:
    """Return the index [M] (into the masked tokens) of the target that each prediction is compared with.

    log_p: [M, K + 1] of the masked tokens, frame by frame. targets: [M]. masked: [F, N] bool with M set.
    """
    matched = torch.arange(len(targets), device=targets.device)
    place = torch.full(masked.shape, -1, dtype=torch.int64, device=masked.device)
    place[masked] = matched
    types = torch.tensor(layout.node_types, device=masked.device)
    for kind in (ALLY, ENEMY):
        slots = place[:, types == kind]
        counts = (slots >= 0).sum(1)
        for m in range(2, int(counts.max()) + 1 if len(counts) else 0):
            group = slots[counts == m]
            if not len(group):
                continue
            tokens = group[group >= 0].view(-1, m)
            cost = -log_p[tokens[:, :, None], targets[tokens][:, None, :]]
            matched[tokens] = tokens.gather(1, cheapest(cost))
    return matched
