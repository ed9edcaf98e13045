"""torch.compile for `compile=True`."""

from __future__ import annotations

from torch import nn

from omagd.config.schema import Config

BACKEND = "inductor"


def maybe_compile(config: Config, *modules: nn.Module) -> None:
    """Compile the forward of each module in place if `compile` is set, for batches of any size.

    Parameters and state dicts keep their names; copies of a module are not compiled. Only mixers are compiled: on a CPU
    their forward and backward take an eighth less time, while graph convolutions take twice as long in backward, and
    the agents' GRU has its own backward already.
    """
    if config.compile:
        for module in modules:
            module.compile(dynamic=True, backend=BACKEND)
