"""Memory: the size of replay, and the key to reduce when there is none left."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from omagd import controllers
from omagd.components.episode_codec import Codec, spec_of
from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.loading import resolve
from omagd.controllers.basic_mac import BasicMAC
from omagd.envs.protocol import Observation
from omagd.run.memory_budget import asked_bytes, oom_hint, replay_bytes, replay_spec
from omagd.runners.rollout import Recorder
from omagd.utils.errors import UserError

LAYOUT = EntityLayout(4, 6, 5, 4, 5, 1)
INFO = EnvInfo("null", "5m_vs_6m", 5, 12, 55, 98, 70, 6, LAYOUT)
GB = 2**30


def config(name: str = "qmix", **updates):
    return resolve(config=name, env_config="skirmish", updates=updates)


@pytest.mark.parametrize(("name", "updates", "extras"), [
    ("qmix", {}, {}), ("gnn_qmix", {"use_full_obs": True}, {}), ("fog_team_obs", {}, {}),
    ("omagd", {"mask_predictor_config.decode": "mean"}, {"recon": np.zeros((1, 5, 55), np.float16)}),
    ("omagd", {"mask_predictor_config.decode": "argmax"}, {"tokens": np.zeros((1, 5, 11), np.int16)}),
])  # fmt: skip
def test_the_estimate_is_what_a_recorded_episode_takes(name, updates, extras):
    made = config(name, **updates)
    recorder, one = Recorder(INFO, 1, made.use_full_obs or made.use_team_obs), np.array([0])
    recorder.begin()
    obs = np.zeros((1, 5, 55), np.float32)
    seen = Observation(obs, np.zeros((1, 98), np.float32), np.zeros((1, 5, 12), bool), obs)
    recorder.record_observations(one, one, seen)
    recorder.record_actions(one, one, np.zeros((1, 5), np.int64), extras)
    spec = spec_of(recorder.take(0, 1))
    assert replay_spec(made, INFO) == spec
    assert replay_bytes(made, INFO) == Codec(spec).width * 71 * made.buffer_size
    assert replay_bytes(made.model_copy(update={"evaluate": True}), INFO) == 0


@pytest.mark.parametrize("updates", [{"reconstructer_stage": "stage2"}, {"pretrain_only": True}])
def test_a_run_without_stage_3_has_no_replay(updates):
    assert replay_bytes(config("omagd", **updates), INFO) == 0


def test_what_a_controller_of_ones_own_keeps_is_counted(monkeypatch):
    class Moody(BasicMAC):
        @classmethod
        def extra_fields(cls, config, info):
            return {"mood": (torch.float32, (info.n_agents, 7))}

    made = config()
    plain = replay_bytes(made, INFO)
    monkeypatch.setattr(controllers.REGISTRY, "get", lambda name: Moody)
    assert replay_bytes(made, INFO) == plain + 4 * 5 * 7 * 71 * made.buffer_size


ERRORS = (
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 1 GiB"), 2.5 * GB),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
    (np._core._exceptions._ArrayMemoryError((GB,), np.dtype(np.float64)), 8 * GB),
    (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1048576 bytes."), 2**20),
    (MemoryError(), 0),
    (OSError(12, "Cannot allocate memory"), 0),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    (OSError(28, "No space left on device"), None),
)


@pytest.mark.parametrize(("error", "asked"), ERRORS)
def test_what_is_memory_and_how_much_was_asked_for(error, asked):
    assert asked_bytes(error) == asked


KEYS = (
    ("stage1", "update", ["graph_frames_at_once=1024", "graph_pretrain_batch_size=128"]),
    ("stage2", "test", ["graph_frames_at_once=1024", "graph_pretrain_eval_episodes=40"]),
    ("stage1", "collect", ["batch_size_run=8", "graph_pretrain_episodes=5000"]),
    ("stage3", "update", ["accumulate=4", "batch_size=128"]),
    ("stage3", "replay", ["buffer_size=5000"]),
    ("preflight", "networks", ["Lower one of agent_args.hyper_dim=60000, rnn_hidden_dim=64"]),
)


@pytest.mark.parametrize(("stage", "phase", "words"), KEYS)
def test_running_out_names_the_key_to_reduce(stage, phase, words):
    made = config("omagd", batch_size=128, accumulate=2, batch_size_run=8, graph_frames_at_once=2048, rnn_hidden_dim=64)
    made = made.model_copy(update={"agent_args": {"hyper_dim": 60000}})
    with pytest.raises(UserError) as error, oom_hint(made, stage, phase):
        raise MemoryError("Unable to allocate 3.00 GiB for an array")
    assert all(word in error.value.message for word in [*words, stage, "3.0 GB", "holds"])
    assert "\n" not in error.value.render()


LIMITED = """
import resource, sys
from omagd.run.cli import main as command_line
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
sys.exit(command_line.main(sys.argv[1:]))
"""


def test_a_run_that_does_not_fit_ends_with_one_line(tmp_path):
    updates = ["env_args.map_name=27m_vs_30m", "batch_size_run=1500", "use_cuda=False", "t_max=10"]
    command = [sys.executable, "-c", LIMITED, "--config=qmix", "--env-config=skirmish", "-u", "with", *updates]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert "out of memory in stage3 (collect)" in line and "batch_size_run=1500" in line
