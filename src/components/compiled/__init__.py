"""Kernels of what a tick does besides battles and networks."""
