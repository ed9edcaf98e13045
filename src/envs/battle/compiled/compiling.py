"""How the kernels are compiled: each function is written once, as plain loops over one battle, for CPUs and GPUs.

`function` marks what a kernel may call, `battles` a kernel that runs one function for each battle of a batch. On a CPU
both are compiled by Numba, without any option that changes results: no fused multiply-add, no reordered sums. A CUDA
kernel can call the same functions (`numba-cuda`).
"""

from __future__ import annotations

from numba import njit

function = njit(cache=False, error_model="numpy", _nrt=False, forceinline=True)
