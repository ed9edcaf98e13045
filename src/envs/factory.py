"""Creates environments from the keys `env` and `env_args`; errors name the key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from omagd.config.messages import typed_args
from omagd.envs import REGISTRY
from omagd.envs.protocol import BatchedEnv, MultiAgentEnv
from omagd.utils.errors import UserError


def validate_env_args(name: str, env_args: dict[str, Any]) -> BaseModel:
    """Return the typed arguments of environment `name`; builds nothing.

    Errors: UserError for an unknown environment or key, a wrong type, or a value out of range.
    """
    model: type[BaseModel] = REGISTRY.get(name).args_model  # type: ignore[attr-defined]
    return typed_args("env_args", f"env={name}", model, env_args, lambda key: "")


def make_env(name: str, env_args: dict[str, Any], n_slots: int, processes: bool) -> BatchedEnv:
    """Return environment `name` with `n_slots` slots.

    Args:
        processes: run each slot in its own worker process. Otherwise a batched environment runs as it is, and single
            ones are stepped one after another in this process.

    Errors: UserError for an unknown name, wrong arguments, missing software, or `processes` with a batched environment
        that cannot be divided.
    """
    args = validate_env_args(name, env_args)
    cls: Any = REGISTRY.get(name)
    if not issubclass(cls, MultiAgentEnv):
        if not processes:
            env: BatchedEnv = cls(args, n_slots)
            return env
        if not cls.divisible:
            raise UserError(f"env_processes=True: env={name} computes all battles at once; use env_processes=False")
    # Imported here, since batched environments do not need multiprocessing.
    from omagd.envs.workers.process_envs import ProcessEnvs
    from omagd.envs.workers.vector import SerialEnvs

    adapter = ProcessEnvs if processes else SerialEnvs
    return adapter(cls, args, n_slots, name=name)
