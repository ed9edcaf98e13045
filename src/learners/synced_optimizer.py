"""Optimizer steps and running moments that are the same however a batch is divided over ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from omagd.config.schema import Config
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import rewards_of_agents
from omagd.utils.registry import described, owner_of

if TYPE_CHECKING:
    from omagd.modules.agents.agent import AgentInputs, Remembers
    from omagd.utils.packing import PackedBatch, Packing

Stats = Mapping[str, tuple[Tensor, Tensor]]
"""Named sums with their counts: (sum, count), both scalars."""

SKIPPED = "skipped_updates"
"""The entry of a learner's stats that says whether its update was skipped: (1 or 0, 1), the same on all ranks."""

WARM_UP_PASSES = 2
_NORM = "grad_norm"
_base = torch.optim.Adam


def merge(one: Stats, other: Stats) -> Stats:
    """Return stats whose sums and counts are added by name."""
    out = dict(one)
    for name, (total, count) in other.items():
        out[name] = (out[name][0] + total, out[name][1] + count) if name in out else (total, count)
    return out


class LossModule(nn.Module):
    """Everything that has gradients, behind one forward; this is the module that DDP wraps.

    `forward(*batch)` returns `(loss_sum, stats)`: the **sum** of the loss over this rank's samples, which depends on
    every parameter even when there is no sample, and stats without gradients. Losses with samples of their own come as
    a vector of sums.
    """


class AgentLoss(LossModule):
    """Base of an agent's losses, to which the loss of the belief head is added as a second one where there is a head.

    Args:
        agent: trained; every parameter takes part in every forward. bf16: whether matrix products on a GPU use bf16.

    Attributes:
        belief: the second loss, a `BeliefLoss`, from hidden states and cases; None without `belief_loss`.
    """

    belief: nn.Module | None

    def __init__(self, agent: nn.Module, bf16: bool = False) -> None:
        super().__init__()
        self.agent, self.bf16 = agent, bf16
        self.belief = None

    def unroll(
        self, inputs: AgentInputs, packing: Packing, cases: object | None
    ) -> tuple[Tensor, tuple[Tensor, Stats] | None]:
        """Return the agent's outputs [S, n, A], and the loss of the `cases` with its stats, None without a head."""
        if self.belief is None:
            return self.agent(inputs, packing), None
        assert cases is not None
        outputs, hidden = cast("Remembers", self.agent).unroll(inputs, packing)
        return outputs, self.belief(hidden, cases)

    @staticmethod
    def with_belief(loss: Tensor, stats: Stats, belief: tuple[Tensor, Stats] | None) -> tuple[Tensor, Stats]:
        """Return losses and their stats, followed by those of the head."""
        if belief is None:
            return loss, stats
        # Sums with a count of their own: each loss is averaged over its own samples.
        return torch.cat([loss.view(-1), belief[0].to(loss.dtype).view(1)]), {**stats, **belief[1]}


@dataclass(frozen=True)
class UpdateResult:
    """Outcome of a step.

    Attributes:
        stepped: False if no rank had a sample; True also if only the device knows that.
        finite: scalar bool on the device: whether the gradient norm is finite (and `where` held). If not, nothing
            changed, `skipped` is (1, 1) and all other sums and counts are 0, which leaves the update out of the means.
        norm: (global gradient norm before clipping, 1). skipped: (0, 1), the pair for `SKIPPED`. Both counts are 0 if
            no rank had a sample. stats: of the loss module.
    """

    stepped: bool
    finite: Tensor
    norm: tuple[Tensor, Tensor]
    skipped: tuple[Tensor, Tensor]
    stats: Stats


class Adam(_base):
    """`torch.optim.Adam(fused=True)`, without torch's compiler.

    torch wraps the methods of optimizers for `torch.compile`, and the first call imports it: 0.9 seconds and 70 MB in
    each process. Nothing here compiles an optimizer, so these methods call the functions inside the wrappers.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, eps: float = 1e-8, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        super().__init__(parameters, lr=lr, eps=eps, betas=betas, fused=True)

    step = torch.no_grad()(inspect.unwrap(_base.step))
    zero_grad = inspect.unwrap(_base.zero_grad)
    add_param_group = inspect.unwrap(_base.add_param_group)
    state_dict = inspect.unwrap(_base.state_dict)
    load_state_dict = inspect.unwrap(_base.load_state_dict)


class RMSprop(Adam):
    """RMSprop (Tieleman and Hinton 2012) as PyMARL sets it: v = .99 v + .01 g², w = w - lr g / (sqrt(v) + 1e-5).

    That is Adam without momentum and without its correction of the first steps, so torch's fused kernel computes it.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, lr=lr, eps=1e-5, betas=(0.0, 0.99))
        for weight in self.param_groups[0]["params"]:
            zeros = (torch.zeros_like(weight, memory_format=torch.preserve_format) for _ in range(2))
            # Adam divides v by 1 - .99^step, which is 1 from the start at such a number of steps.
            step = torch.full((), 1e5, device=weight.device)
            self.state[weight] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (step, *zeros), strict=True))


OPTIMIZERS: dict[str, type[Adam]] = {"adam": Adam, "rmsprop": RMSprop}


DECAY = 0.99  # of running moments, per batch; MAPPO's code has 0.99999 per minibatch
LEAST_VARIANCE = 1e-4  # MAPPO's code has 0.01


def sums_of(values: Tensor, weight: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Return the sums of weights, of weighted values and of their squares over `dims` (None: all), [3, ...] float64."""
    values, weight = values.double(), weight.double().expand_as(values)
    return torch.stack([part.sum(dims) for part in (weight, values * weight, values.square() * weight)])


class RunningMoments(nn.Module):
    """Running mean and deviation of numbers, the same on all ranks.

    Exponential averages over batches, corrected for their start at 0 as in Adam: MAPPO's value normalisation with other
    constants, so that means follow within some hundred batches.

    Args:
        device: of the moments. shape: of the numbers. least: the smallest variance.

    Attributes:
        moments: [3, *shape] float64, averages of 1, x and x².
    """

    moments: Tensor

    def __init__(self, device: torch.device, shape: tuple[int, ...] = (), least: float = LEAST_VARIANCE) -> None:
        super().__init__()
        self.least = least
        self.register_buffer("moments", torch.zeros(3, *shape, dtype=torch.float64, device=device))

    def add(self, sums: Tensor) -> None:
        """Count a batch by its `sums_of` over all ranks; what has no count in it, or overflows, stays as it was."""
        # Exponential averages of 1, x and x²; the first one corrects the start at 0, as in Adam (Kingma & Ba 2015).
        count, finite = sums[:1], sums.isfinite().all()
        self.moments.lerp_(sums.where(finite, 0.0) / count.clamp(min=1), (1 - DECAY) * ((count > 0) & finite).double())

    @property
    def scale(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation, float64; 0 and 1 at the start."""
        weight, first, second = self.moments
        some = weight.clamp(min=1e-30)
        mean = first / some
        deviation = (second / some - mean.square()).clamp(min=self.least).sqrt()
        return mean, torch.where(weight > 0, deviation, 1.0)


def moments_of_rewards(loss: LossModule, config: Config) -> RunningMoments | None:
    """Return new moments for `standardised`, None where rewards stay as they are."""
    if not config.standardise_rewards:
        return None
    moments = RunningMoments(next(loss.parameters()).device)
    loss.add_module("rewards", moments)  # an update changes them, as it changes weights
    return moments


def standardised(parts: Sequence[PackedBatch], moments: RunningMoments | None, dist: Dist) -> Sequence[PackedBatch]:
    """Return (parts of) a batch with rewards over their running root mean square, in which they count. A collective.

    EPyMARL's `standardise_rewards` also subtracts the mean; here it stays, since without it an agent would earn by
    longer or by shorter episodes. moments: of agents' own rewards where there are any; None: rewards stay as they are.
    """
    if moments is None:
        return parts
    # Rewards of agents can cancel in the team's, which would then divide them by nearly nothing.
    sums = [sums_of(rewards_of_agents(part), part.valid_mask.unsqueeze(-1)) for part in parts]
    moments.add(dist.sum(torch.stack(sums).sum(0)))
    size = torch.hypot(*moments.scale)
    found = []
    for part in parts:
        rewards = {name: part[name] for name in ("reward", "agent_reward") if name in part}
        found.append(replace(part, data={**part.data, **{k: (r / size).to(r.dtype) for k, r in rewards.items()}}))
    return found


def lr_scale(config: Config, world_size: int) -> float:
    """Return the factor of all learning rates with W ranks: 1, sqrt(W) or W (`lr_scaling` none, sqrt, linear)."""
    return {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": float(world_size)}[config.lr_scaling]


class SyncedOptimizer:
    """Forward, backward, clip and step, with sums and counts over all ranks.

    With loss sums l_r and sample counts c_r of ranks r = 1..W, the gradient is that of one process with all samples,
    g = grad(sum_r l_r) / sum_r c_r. DDP returns the mean over ranks, (1/W) sum_r grad(x_r), so each rank's backward
    starts from x_r = l_r W / sum_r c_r. Then g is clipped: g * min(1, max_norm / |g|).

    A step whose gradient norm is not finite changes neither weights nor the optimizer's state. The norm is taken after
    the sum over ranks, so all ranks decide alike. On a GPU the decision stays on the device and a fused optimizer
    reads it there (`found_inf`, as with gradient scalers); any other optimizer makes the host wait.

    Attributes:
        sums_once: gradients are summed over ranks by one collective after the last backward, in place of DDP, whose
            hooks no CUDA graph can hold. The same sum, up to rounding.

    Args:
        loss_module: its trainable parameters are exactly those of the optimizer. optimizer: over them. dist: the ranks.
        max_norm: norm to which the global gradient is clipped. bucket_cap_mb: megabytes of gradients that are exchanged
            at once.
    """

    def __init__(
        self,
        loss_module: LossModule,
        optimizer: torch.optim.Optimizer,
        dist: Dist,
        max_norm: float,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        self.loss_module = loss_module
        self.optimizer = optimizer
        self.dist = dist
        self.max_norm = max_norm
        self._wrapped = dist.wrap(loss_module, bucket_cap_mb)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.sums_once = False
        self._checked = False

    def warm_up(self, *batch: object) -> None:
        """Run two discarded passes.

        DDP rebuilds its buckets after the first pass; from then on the order of sums is fixed. The random state and the
        buffers of the loss module are restored. Errors: UserError for parameters without a gradient.
        """
        with torch.random.fork_rng(devices=[self.dist.device] if self.dist.device.type == "cuda" else []):
            kept = {name: value.clone() for name, value in self.loss_module.named_buffers()}
            for _ in range(WARM_UP_PASSES):
                returned = self._wrapped(*batch)
                if not (isinstance(returned, tuple) and len(returned) == 2):
                    raise UserError(f"{described(type(self.loss_module))}: forward must return (sum of losses, stats)")
                loss, _ = returned
                # Gradients of 0: the pass shows which parameters take part, and fixes DDP's order of sums.
                (loss * 0.0).sum().backward()
                self._require_gradients()
            for name, value in self.loss_module.named_buffers():
                value.copy_(kept[name])
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self, count: Tensor, *parts: tuple[object, ...], where: Tensor | None = None) -> UpdateResult:
        """Take one step on this rank's samples, which pass forward and backward part after part.

        count: this rank's number (or weight) of samples in all parts, on the CPU or on the device: a scalar, or one for
            each of several losses, whose means are added. Without samples of the first one there is no step.
        parts: arguments of the loss module, at least one; ranks may have different numbers of parts. Their losses add
            up, and only the last part exchanges gradients.
        where: scalar bool on the device; where it is False, this step is skipped as well.
        """
        # The sum over ranks runs while the first part computes its loss.
        total = self.dist.sum_later(count)
        scale, some = None, torch.zeros(())
        stats: Stats = {}
        wrapped, divided_by = (self.loss_module, 1) if self.sums_once else (self._wrapped, self.dist.world_size)
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == len(parts) else self.dist.apart(wrapped):
                loss_sum, of_part = wrapped(*part)
                if scale is None:
                    some = total.wait()
                    # W / (sum of c_r): DDP divides by W what it adds up. Without samples the gradient is 0, not 0 / 0.
                    scale = (divided_by / some.to(loss_sum.dtype)).where(some > 0, 0.0)
                    scale = scale.to(loss_sum.device, non_blocking=True)
                scaled = loss_sum * scale
                self.dist.backward(scaled.sum() if scaled.dim() else scaled, wrapped)
            stats = merge(stats, of_part)
        self._require_gradients()
        if self.sums_once:
            self._sum_gradients()
        # The norm of the gradient over all ranks, so that all clip by the same factor (Pascanu et al. 2013).
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.max_norm).detach()
        finite = grad_norm < torch.inf if where is None else (grad_norm < torch.inf) & where
        plain = grad_norm.device.type == "cpu" and bool(finite)  # nothing has to be decided on a device
        skipped = torch.zeros(()) if plain else (~finite).float()
        some = some.flatten()[0]
        # A number on the device is not waited for: the optimizer skips the step there if no rank had a sample.
        waits = some.device.type == "cpu"
        stepped = not waits or bool(some > 0)
        if stepped:
            idle = None if plain else skipped
            self._step_unless(idle if waits else torch.maximum(skipped, (some <= 0).to(skipped)))
            self._count_writes()
        self.optimizer.zero_grad(set_to_none=True)
        one = torch.full_like(grad_norm, float(stepped)) if waits else (some > 0).to(grad_norm)
        named = {**stats, _NORM: (grad_norm, one)}
        named = named if plain else _zeros_unless(finite, named)
        return UpdateResult(stepped, finite, named.pop(_NORM), (skipped, one), named)

    def _sum_gradients(self) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        total = self.dist.sum(torch.cat([grad.flatten() for grad in grads]))
        parts = total.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])

    def _require_gradients(self) -> None:
        """Reject trainable parameters that the first backward pass gave no gradient: DDP would wait for it."""
        if self._checked:
            return
        self._checked = True
        unused: dict[str, list[str]] = {}
        for name, parameter in self.loss_module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                owner, own_name = self._component(name)
                unused.setdefault(owner, []).append(own_name)
        if unused:
            found = "; ".join(f"{owner}: {', '.join(dict.fromkeys(names))}" for owner, names in unused.items())
            raise UserError(
                f"{found}: no gradient, since they take no part in the loss. Use these parameters in every forward,"
                " remove them, or freeze them (requires_grad_(False))"
            ).on_all_ranks()

    def _component(self, name: str) -> tuple[str, str]:
        """Return the component of a parameter, `agent=rnn` or the class of the loss, and the parameter's name there."""
        module, parts = self.loss_module, name.split(".")
        for number, part in enumerate(parts[:-1], start=1):
            module = getattr(module, part)
            if owner := owner_of(type(module)):
                return owner, ".".join(parts[number:])
        return described(type(self.loss_module)), name

    def replayed(self) -> None:
        """Count what a call would have counted on the host; a CUDA graph of a call does only its work on the device."""
        self.dist.waits.ticks += 1
        self._count_writes()

    def _count_writes(self) -> None:
        """Count writes of weights, as fused optimizers do not: acting agents renew their cached tables by that."""
        torch.autograd.graph.increment_version(self.parameters)

    def _step_unless(self, skipped: Tensor | None) -> None:
        """Let the optimizer step unless `skipped` is 1; None: step."""
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self.optimizer.step()
        elif skipped is None or not bool(skipped):
            self.optimizer.step()


def _zeros_unless(finite: Tensor, stats: Stats) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `stats` where `finite` holds, otherwise sums and counts of 0: the loss of a skipped update may be NaN."""
    return {
        name: (torch.where(finite, total, 0), torch.where(finite, count, 0)) for name, (total, count) in stats.items()
    }
