"""One optimisation step that is the same however a batch is dealt to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omagd.utils.dist_utils import Dist

Stats = Mapping[str, tuple[Tensor, Tensor]]
"""Named sums with their counts: (sum, count), both scalars."""

SKIPPED = "skipped_updates"
"""The entry of a learner's stats that says, as (1 or 0, 1), whether its update was skipped; the same on all ranks."""

WARM_UP_PASSES = 2
_NORM, _USUAL = "grad_norm", torch.float32


def merge(one: Stats, other: Stats) -> Stats:
    """Return stats whose sums and counts are added by name."""
    out = dict(one)
    for name, (total, count) in other.items():
        out[name] = (out[name][0] + total, out[name][1] + count) if name in out else (total, count)
    return out


class LossModule(nn.Module):
    """What has gradients in a stage, behind one forward; this is what is wrapped for several ranks.

    `forward(*batch)` returns `(loss_sum, stats)`: the **sum** of the loss over this rank's samples (differentiable, and
    reaching every parameter even when no sample counts) and detached stats.
    """


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        stepped: False when no rank had a sample. loss: this rank's sum. grad_norm: the global one before clipping.
        finite: scalar bool on the device: whether `grad_norm` is finite (and `where` held); else nothing has changed.
        norm: (`grad_norm`, 1). skipped: (0, 1), the pair for `SKIPPED`. stats: of the objective. Where `finite` is
            False, `skipped` is (1, 1), and all other sums and counts are 0, so that means leave the update out.
    """

    stepped: bool
    loss: Tensor
    grad_norm: Tensor
    finite: Tensor
    norm: tuple[Tensor, Tensor]
    skipped: tuple[Tensor, Tensor]
    stats: Stats


def copy_where(condition: Tensor, old: Iterable[Tensor], new: Iterable[Tensor]) -> None:
    """Copy each tensor of `new` over its partner in `old` where `condition` holds (scalar bool on the same device)."""
    for before, after in zip(old, new, strict=True):
        before.copy_(torch.where(condition, after, before))


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether the norm of every floating-point tensor (at least one, on one device) is finite: a scalar bool."""
    return torch.stack(torch._foreach_norm([t for t in tensors if t.is_floating_point()])).isfinite().all()


class SyncedOptimizer:
    """Forward, backward, clip and step with sums and counts over all ranks.

    A step whose global gradient norm is not finite changes neither weights nor the optimizer's state. Gradients are
    summed over the ranks before the norm is taken, so all ranks decide alike. On a GPU the decision is made there: the
    host does not wait, and a fused optimizer reads it (`found_inf`, as with gradient scalers); any other one makes the
    host wait.

    Args:
        objective: bare objective; its trainable parameters are exactly the optimizer's.
        optimizer: over them. dist: the ranks. max_norm: gradient norm at which the global gradient is clipped.
        bucket_cap_mb: megabytes of gradients that are exchanged at once.
    """

    def __init__(
        self,
        objective: LossModule,
        optimizer: torch.optim.Optimizer,
        dist: Dist,
        max_norm: float,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        self.objective = objective
        self.optimizer = optimizer
        self.dist = dist
        self.max_norm = max_norm
        self._wrapped = dist.wrap(objective, bucket_cap_mb)
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def warm_up(self, *batch: object) -> int:
        """Run two discarded passes: buckets are rebuilt now, so that sums keep one order for good.

        Restores the random state and every buffer of the objective. Returns the number of passes.
        """
        with torch.random.fork_rng(devices=[self.dist.device] if self.dist.device.type == "cuda" else []):
            kept = {name: value.clone() for name, value in self.objective.named_buffers()}
            for _ in range(WARM_UP_PASSES):
                loss, _ = self._wrapped(*batch)
                (loss * 0.0).backward()
            for name, value in self.objective.named_buffers():
                value.copy_(kept[name])
        self.optimizer.zero_grad(set_to_none=True)
        return WARM_UP_PASSES

    def __call__(self, count: Tensor, *parts: tuple[object, ...], where: Tensor | None = None) -> StepResult:
        """Take one step on this rank's samples, which pass forward and backward part after part.

        count: scalar, this rank's number (or weight) of samples that the losses of all parts sum over; int64 where
            whole, and best on the CPU, where nothing waits for a device.
        parts: arguments of the objective, at least one; ranks may have different numbers of them. The losses are sums
            and divided by one count, so that parts add up to the whole; only the last one exchanges gradients.
        where: scalar bool on the device; where it is False, this step is skipped as well.
        """
        total = self.dist.sum_later(count)
        stats: Stats = {}
        loss, scale, some = torch.zeros(()), None, torch.zeros(())
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == len(parts) else self.dist.apart(self._wrapped):
                loss_sum, of_part = self._wrapped(*part)
                if scale is None:
                    # DDP averages over ranks; the true loss is (sum over ranks) / (count over ranks).
                    some = total.wait()
                    scale = (self.dist.world_size / some.to(loss_sum.dtype)).where(some > 0, 0.0).to(loss_sum.device)
                self.dist.backward(loss_sum * scale, self._wrapped)
            loss, stats = loss_sum.detach() + loss.to(loss_sum.device), merge(stats, of_part)
        grad_norm = nn.utils.clip_grad_norm_(self._parameters, self.max_norm).detach()
        finite = grad_norm < torch.inf if where is None else (grad_norm < torch.inf) & where
        plain = grad_norm.device.type == "cpu" and bool(finite)  # nothing has to be decided on a device
        skipped = torch.zeros(()) if plain else (~finite).float()
        stepped = bool(some > 0)
        if stepped:
            self._step_unless(None if plain else skipped)
            # torch's fused optimizers write without saying so; what is kept while acting is renewed by these counters.
            torch.autograd.graph.increment_version(self._parameters)
        self.optimizer.zero_grad(set_to_none=True)
        one = torch.ones_like(grad_norm)
        named = {**stats, _NORM: (grad_norm, one)}
        named = named if plain else _nothing_unless(finite, named)
        return StepResult(stepped, loss, grad_norm, finite, named.pop(_NORM), (skipped, one), named)

    def _step_unless(self, skipped: Tensor | None) -> None:
        """Let the optimizer step where `skipped` is 0; None: everywhere."""
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self.optimizer.step()
        elif skipped is None or not bool(skipped):
            self.optimizer.step()


def _nothing_unless(finite: Tensor, stats: Stats) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `stats` where `finite` holds, else sums and counts of 0. The loss of a skipped update may be a NaN.

    Scalars of the usual type, nearly all there are, take one operation together.
    """
    alike = {name: pair for name, pair in stats.items() if all(v.dim() == 0 and v.dtype == _USUAL for v in pair)}
    flat: tuple[Tensor, ...] = ()
    if alike:
        flat = torch.where(finite, torch.stack([value for pair in alike.values() for value in pair]), 0.0).unbind()
    out = dict(zip(alike, zip(flat[::2], flat[1::2], strict=True), strict=True))
    for name, (total, count) in stats.items():
        if name not in alike:
            out[name] = torch.where(finite, total, 0), torch.where(finite, count, 0)
    return out
