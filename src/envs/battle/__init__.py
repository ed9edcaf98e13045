"""Battles: SMAC's rules, and the built-in simulator.

SMAC's rules, for any back-end (`backend`): `semantics` (one step), `actions` (masks and orders), `features`
(observations and state), `reward`, `v2_semantics` (SMACv2). Simulator: `simulator` (one step), `combat`, `physics`,
`starts` (where battles begin), `roster` (state). Data: `maps`, `units`, `args`, `fog` (names of maps with another sight
or start). The environment: `skirmish_env`, with the policies in `scripted`.
"""
