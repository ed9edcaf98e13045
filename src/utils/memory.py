"""How much memory this process holds, and how busy its card is."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

MEGABYTE = 2.0**20


def usage(device: torch.device) -> dict[str, float]:
    """Return `memory/rss_mb` and, on a GPU, `memory/gpu_mb`, `memory/gpu_peak_mb` and `gpu/use` (0 to 1), where known.

    Megabytes of 2^20 bytes; the GPU's are those that torch has given out, now and at most since the start.
    """
    values = {"memory/rss_mb": resident_bytes() / MEGABYTE}
    if device.type == "cuda":
        values["memory/gpu_mb"] = torch.cuda.memory_allocated(device) / MEGABYTE
        values["memory/gpu_peak_mb"] = torch.cuda.max_memory_allocated(device) / MEGABYTE
        try:
            values["gpu/use"] = torch.cuda.utilization(device) / 100.0
        except Exception:  # noqa: BLE001 (without NVML, whatever its reason, there is no such figure)
            values.pop("gpu/use", None)
    return values


def resident_bytes() -> int:
    """Return the bytes of main memory that this process holds; where the system does not tell, the most it held."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def over_ranks(parts: list[dict[str, float]], each: bool) -> dict[str, float]:
    """Return the largest value of every name over the ranks' `usage`; with `each`, every rank's as `<name>_rank<r>`."""
    names = sorted({name for part in parts for name in part})
    values = {name: max(part[name] for part in parts if name in part) for name in names}
    if each:
        values |= {
            f"{name}_rank{rank}": part[name] for rank, part in enumerate(parts) for name in names if name in part
        }
    return values
