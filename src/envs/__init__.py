"""Environments. `REGISTRY` maps the names of the key `env` to classes."""

from __future__ import annotations

from omagd.utils.registry import Registry

REGISTRY: Registry[type] = Registry(
    "env",
    "omagd.envs",
    lazy={
        "skirmish": "omagd.envs.battle.skirmish_env:SkirmishEnv",
        "smax": "omagd.envs.smax:SmaxEnv",
        "jaxmarl": "omagd.envs.jaxmarl_env:JaxMarlEnv",
        "sc2": "omagd.envs.sc2.sc2_env:SC2Env",
        "sc2_v2": "omagd.envs.sc2.sc2_env:SC2V2Env",
        "snakes_3v3": "omagd.envs.snakes.snakes_env:Snakes3v3",
        "matrix_game": "omagd.envs.sanity:MatrixGame",
        "memory_game": "omagd.envs.sanity:MemoryGame",
        "gymma": "omagd.envs.adapters:GymmaEnv",
        "pettingzoo": "omagd.envs.adapters:PettingZooEnv",
        "pymarl": "omagd.envs.pymarl_env:PyMARLEnv",
        "lbf": "omagd.envs.worlds:Lbf",
        "mpe": "omagd.envs.worlds:Mpe",
        "rware": "omagd.envs.worlds:Rware",
    },
    protocol="omagd.envs.protocol:protocol_of",
)
