"""torch.compile where the configuration asks for it."""

from __future__ import annotations

from torch import nn

from omagd.config.schema import Config

BACKEND = "inductor"


def maybe_compile(config: Config, *modules: nn.Module) -> None:
    """Compile the forward of each module in place if `compile` asks for it, for batches of any size.

    Names and number of parameters stay as they are, and so do state dicts; copies made of a module are not compiled.
    Measured on a CPU: a mixer's forward and backward take an eighth less time; graph convolutions twice as much in
    backward, and the recurrence of the agents, with its own gradient, has nothing to be fused. So mixers are compiled.
    """
    if config.compile:
        for module in modules:
            module.compile(dynamic=True, backend=BACKEND)
