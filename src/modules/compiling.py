"""torch.compile where the configuration asks for it."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from omagd.config.schema import Config

Module = TypeVar("Module", bound=nn.Module)


def maybe_compile(module: Module, config: Config) -> Module:
    """Compile the module's forward in place under `compile`, for batches of any size; return the module.

    Names and number of parameters stay as they are.
    """
    if config.compile:
        module.compile(dynamic=True)
    return module
