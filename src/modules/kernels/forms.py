"""Whether another form of a module may stand in for it.

Frozen, fused and compiled forms read weights and call no `forward`, so they are for exactly the classes that they were
written for: a subclass may compute something else, and what acts must be what trains.
"""

from __future__ import annotations

from torch import nn

from omagd.utils.errors import UserError


def is_only(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module and all its parts are of these classes, not of subclasses, and have no forward hooks."""
    parts = [module]  # `module.modules()` takes several times as long, and this is asked at every tick
    for part in parts:
        if type(part) not in kinds or part._forward_hooks or part._forward_pre_hooks:
            return False
        parts += [inner for inner in part._modules.values() if inner is not None]
    return True


def overridden_alone(kind: type, name: str, other: str) -> type | None:
    """Return the class that `kind` has its method `other` from, if its method `name` is of a class below that one."""
    order = kind.__mro__
    one, inherited = (next(each for each in order if method in vars(each)) for method in (name, other))
    return inherited if order.index(one) < order.index(inherited) else None


def require_step(module: nn.Module, parts: str) -> None:
    """Reject a class that trains with a `forward` of its own and would act with the `step` of a class above it.

    parts: the methods that both call, for the message. Errors: UserError.
    """
    if (above := overridden_alone(type(module), "forward", "step")) is not None:
        raise UserError(
            f"{type(module).__name__}: has a forward of its own, which trains, but would act with the step of"
            f" {above.__name__}. Override {parts}, which both call, or step too"
        )
