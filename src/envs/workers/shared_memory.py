"""Arrays shared between processes, in anonymous memory: nothing remains on the system however the processes end."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from itertools import accumulate

import numpy as np

from omagd.config.env_info import EnvInfo

Specs = dict[str, tuple[tuple[int, ...], str]]
Arrays = dict[str, np.ndarray]


def array_specs(info: EnvInfo, n_slots: int) -> Specs:
    """Return name -> (shape, dtype) of the arrays shared by all slots."""
    b, n = n_slots, info.n_agents
    actions: tuple[tuple[int, ...], str] = ((b, n), "int64") if info.box is None else ((b, n, info.box.dim), "float32")
    return {
        "obs": ((b, n, info.obs_dim), "float32"),
        "full_obs": ((b, n, info.obs_dim), "float32"),
        "state": ((b, info.state_dim), "float32"),
        "avail": ((b, n, info.n_actions), "bool"),
        "reward": ((b,), "float32"),
        "agent_reward": ((b, n if info.agent_rewards else 0), "float32"),
        "terminated": ((b,), "bool"),
        "truncated": ((b,), "bool"),
        "lost": ((b,), "bool"),
        "actions": actions,
        "seeds": ((b,), "int64"),
        "want_full": ((1,), "bool"),
    }


def _size(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of an array, rounded up to a multiple of 64."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64


def total_size(specs: Specs) -> int:
    """Return the number of bytes of all arrays."""
    return sum(_size(*spec) for spec in specs.values())


def mapped(descriptor: int, specs: Specs) -> Arrays:
    """Return the arrays in a memory, by name."""
    buffer = mmap.mmap(descriptor, total_size(specs))
    starts = accumulate((_size(*spec) for spec in specs.values()), initial=0)
    return {name: np.ndarray(*spec, buffer, start) for (name, spec), start in zip(specs.items(), starts, strict=False)}


def new_memory(size: int) -> int:
    """Return the descriptor of `size` zeroed bytes without a name: they are free when no process has it any more.

    Errors: OSError without enough memory.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("omagd-envs")
    else:  # not Linux: a deleted temporary file
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    return descriptor
