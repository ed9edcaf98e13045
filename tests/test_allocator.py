"""Freed memory is kept for the next request."""

from __future__ import annotations

import resource

import pytest
import torch

from omagd.run.training.device import keep_freed_memory

LARGE = 40 << 20  # bytes; glibc on its own maps every block above 32 MiB again


def faults_of(n_blocks):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(n_blocks):
        torch.empty(LARGE, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_large_blocks_are_not_mapped_again_each_time():
    if not keep_freed_memory():
        pytest.skip("not glibc")
    faults_of(8)
    # Mapped again, each block would fault in its pages again (also huge ones: at least 20 each).
    assert faults_of(10) < 100
