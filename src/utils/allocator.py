"""Memory that is asked for again and again need not go back to the system in between."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks below 1 GiB for the next request; return whether it agreed (False elsewhere).

    Tensors of some megabytes are otherwise mapped, zeroed and given back at every update: measured, a tenth of a QMIX
    update. The process holds its peak memory from then on. Call it once, before the first update.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _LARGE), mallopt(_M_TRIM_THRESHOLD, _LARGE)])
