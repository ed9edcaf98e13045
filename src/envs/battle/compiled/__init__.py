"""Battles of `skirmish` as compiled loops over single battles: the same bits as the NumPy reference, many times faster."""
