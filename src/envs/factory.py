"""Creates environments from the keys `env` and `env_args`; errors name the key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from omagd.config.checks import typed_args
from omagd.config.env_info import EnvInfo
from omagd.envs import REGISTRY
from omagd.envs.protocol import BatchedEnv, MultiAgentEnv
from omagd.envs.task_sets import naming_the_set, task_set
from omagd.utils.errors import UserError


def validate_env_args(name: str, env_args: dict[str, Any]) -> BaseModel:
    """Return the typed arguments of environment `name`; builds nothing. Of a task set: those of its first map.

    Errors: UserError for an unknown environment or key, a wrong type, or a value out of range.
    """
    model: type[BaseModel] = REGISTRY.get(name).args_model  # type: ignore[attr-defined]
    tasks = task_set(given := env_args.get("map_name"))

    def typed(values: dict[str, Any]) -> BaseModel:
        return typed_args("env_args", f"env={name}", model, values, lambda key: "")

    if tasks is None:
        return typed(env_args)
    checked = []
    for map_name in tasks.maps:
        with naming_the_set(given, map_name):
            checked.append(typed({**env_args, "map_name": map_name}))
    return checked[0]


def described_env(name: str, env_args: dict[str, Any]) -> EnvInfo | None:
    """Return the facts of environment `name` where its class has a `describe`, which builds nothing, else None.

    One that a class inherits does not count: its constructor may change the facts, fail or hang.

    Errors: as `make_env`.
    """
    cls: Any = REGISTRY.get(name)
    if "describe" not in vars(cls) or task_set(env_args.get("map_name")) is not None:
        return None
    info: EnvInfo = cls.describe(validate_env_args(name, env_args))
    return info


def make_env(name: str, env_args: dict[str, Any], n_slots: int, processes: bool) -> BatchedEnv:
    """Return environment `name` with `n_slots` slots.

    Args:
        processes: run each slot in its own worker process. Otherwise a batched environment runs as it is, and single
            ones are stepped one after another in this process.

    Errors: UserError for an unknown name, wrong arguments, missing software, or `processes` with a batched environment
        that cannot be divided.
    """
    tasks = task_set(given := env_args.get("map_name"))
    if tasks is not None:
        # Imported here, since most runs have one map.
        from omagd.envs.task_set_env import TaskSetEnv

        def make(map_name: str, slots: int) -> BatchedEnv:
            with naming_the_set(given, map_name):
                return make_env(name, {**env_args, "map_name": map_name}, slots, processes)

        return TaskSetEnv(make, tasks, n_slots)
    args = validate_env_args(name, env_args)
    cls: Any = REGISTRY.get(name)
    if not issubclass(cls, MultiAgentEnv):
        if not processes:
            env: BatchedEnv = REGISTRY.build(name, args, n_slots)
            return env
        if not cls.divisible:
            raise UserError(f"env_processes=True: env={name} computes all battles at once; use env_processes=False")
    # Imported here, since batched environments do not need multiprocessing.
    from omagd.envs.workers.process_envs import ProcessEnvs
    from omagd.envs.workers.vector import SerialEnvs

    adapter = ProcessEnvs if processes else SerialEnvs
    return adapter(cls, args, n_slots, name=name)
