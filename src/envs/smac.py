"""A battle environment with SMAC's methods, by its name."""

from __future__ import annotations

from typing import Any

from omagd.envs import REGISTRY
from omagd.envs.battle.interface import SmacInterface
from omagd.envs.battle.semantics import BattleEnv
from omagd.envs.factory import validate_env_args
from omagd.utils.errors import UserError

NAMES = ("sc2", "sc2_v2", "skirmish")


def make_smac(name: str = "sc2", **env_args: Any) -> SmacInterface:
    """Return the environment `name`, one of `NAMES`, with SMAC's methods; the keys are those of SMAC's constructor.

    Errors: UserError for another name, an unknown key, a wrong value, or a missing game.
    """
    if name not in NAMES:
        raise UserError(f"make_smac({name!r}): only {', '.join(NAMES)} have SMAC's interface; use one of these")
    cls: Any = REGISTRY.get(name)
    args = validate_env_args(name, env_args)
    env: SmacInterface = SmacInterface(cls(args, 1)) if issubclass(cls, BattleEnv) else cls(args)
    return env
