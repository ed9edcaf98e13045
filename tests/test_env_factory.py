"""`env` and `env_args` become an environment, or one line with the key, its value and a fix."""

from __future__ import annotations

import subprocess
import sys

import pytest
from walk_env import Walk, WalkArgs

from omagd.envs import REGISTRY
from omagd.envs.factory import make_env, validate_env_args
from omagd.envs.sanity import MemoryGame
from omagd.envs.workers.vector import SerialEnvs
from omagd.utils.errors import UserError


@pytest.mark.parametrize(
    ("name", "env_args", "parts"),
    [
        ("memory_gam", {}, ["env=memory_gam", "Did you mean 'memory_game'?"]),
        ("memory_game", {"n_cue": 3}, ["env_args.n_cue", "Did you mean 'n_cues'?"]),
        ("memory_game", {"n_cues": "many"}, ["env_args.n_cues=many", "a whole number"]),
        ("memory_game", {"n_cues": 1}, ["env_args.n_cues=1", "at least 2"]),
        ("matrix_game", {"payoff": "climb"}, ["env_args.payoff=climb", "penalty", "Did you mean 'climbing'?"]),
        ("skirmish", {"game_version": "4.10"}, ["env_args.game_version is not an argument of env=skirmish"]),
        ("skirmish", {"heuristic_ai": True}, ["env_args.heuristic_ai is not an argument of env=skirmish"]),
        ("skirmish", {"replay_dir": "here"}, ["env_args.replay_dir is not an argument of env=skirmish"]),
        ("skirmish", {"step_mul": 4}, ["env_args.step_mul is not an argument of env=skirmish"]),
        ("skirmish", {"difficulty": 0}, ["env_args.difficulty=0", "match"]),
        ("smax", {"map_name": "5m_vs6m"}, ["env_args.map_name=5m_vs6m", "Did you mean '5m_vs_6m'?"]),
    ],
)
def test_wrong_arguments_are_reported_with_a_fix(name, env_args, parts):
    with pytest.raises(UserError) as caught:
        make_env(name, env_args, 2, processes=False)
    assert all(part in caught.value.message for part in parts), caught.value.message
    assert "\n" not in caught.value.message


def test_difficulty_may_be_written_as_a_number():
    assert validate_env_args("skirmish", {"difficulty": 3}) == validate_env_args("skirmish", {"difficulty": "3"})


@pytest.mark.processes
def test_arguments_are_checked_without_what_the_game_needs():
    code = (
        "import sys; from omagd.envs.factory import validate_env_args as v; "
        "a = v('smax', {'map_name': '8m'}); assert a.map_name == '8m' and a.max_steps == 100; "
        "print(sorted({'jax', 'jaxmarl', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_batched_environment_is_built_as_it_is():
    env = make_env("memory_game", {"n_cues": 4}, 5, processes=False)
    assert type(env) is MemoryGame
    assert env.n_slots == 5 and env.info.n_actions == 5


def test_a_single_environment_gets_an_adapter_and_its_registered_name(monkeypatch):
    class Required(WalkArgs):
        size: int

    monkeypatch.setitem(REGISTRY._objects, "walk", Walk)
    monkeypatch.setattr(Walk, "args_model", Required)
    env = make_env("walk", {"size": 7}, 3, processes=False)
    assert type(env) is SerialEnvs and (env.info.name, env.info.obs_dim, env.n_slots) == ("walk", 2, 3)
    with pytest.raises(UserError, match="env_args.size"):
        validate_env_args("walk", {})
