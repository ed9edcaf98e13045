"""Battles of `skirmish` as compiled loops over single battles, compiled by Numba."""
