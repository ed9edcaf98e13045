"""Worlds: one protocol, several environments; `REGISTRY` maps `env=` names to them."""

from __future__ import annotations

from omagd.utils.registry import Registry

REGISTRY: Registry[type] = Registry(
    "env",
    "omagd.envs",
    lazy={
        "skirmish": "omagd.envs.battle.skirmish_env:SkirmishEnv",
        "smax": "omagd.envs.smax:SmaxEnv",
        "sc2": "omagd.envs.sc2:SC2Env",
        "matrix_game": "omagd.envs.sanity:MatrixGame",
        "memory_game": "omagd.envs.sanity:MemoryGame",
    },
)
