"""Battles of `skirmish` as compiled loops over single battles: the reference's bits, many times faster."""
