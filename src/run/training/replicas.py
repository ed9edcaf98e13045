"""Whether all ranks hold the same parameters (`distributed_debug=True`), and which one does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from omagd.run.checkpoint.weights import checksum
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError


def held_in_common(learner: Any) -> dict[str, torch.Tensor]:
    """Return every tensor that must be the same on all ranks, by name.

    Parameters and buffers of what is trained (a codebook among them), and of the target networks.
    """
    modules: dict[str, Mapping[str, Any]] = {name: module.state_dict() for name, module in learner.modules().items()}
    modules |= {name: part for name, part in learner.state_dict().items() if name.startswith("target")}
    return {f"{module}.{name}": tensor for module, state in modules.items() for name, tensor in state.items()}


def check_replicas(dist: Dist, learner: Any, when: str) -> None:
    """Compare everything that the ranks hold in common. Called on every rank.

    when: the iteration, for the message. Errors: UserError, on all ranks, that names the first tensor that differs.
    """
    tensors = held_in_common(learner)
    if len(set(dist.gather(checksum(tensors)))) == 1:
        return
    everyone = dist.gather({name: checksum({name: tensor}) for name, tensor in tensors.items()})
    names = [name for name in tensors if len({part.get(name) for part in everyone}) > 1]
    first = names[0]
    sums = [part.get(first) for part in everyone]
    (common, _), *_ = Counter(sums).most_common(1)
    others = [rank for rank, found in enumerate(sums) if found != common]
    agreeing = [rank for rank, found in enumerate(sums) if found == common]
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    raise UserError(
        f"distributed_debug=True: the ranks have come apart {when}: '{first}'{more} of rank {_list(others)} differs"
        f" from that of rank {_list(agreeing)}; something changes weights on one rank alone"
    )


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
