"""Short runs that together set every key of the configuration to a value that is not its default.

Add a new key to one of `RUNS`, or to `ELSEWHERE` with the test that sets it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import omagd
from omagd.config.loading import HERE, SECTIONS, known_keys, read_yaml, resolve
from omagd.run.launch import processes
from omagd.run.training import device as machine

TINY: dict[str, Any] = {
    "batch_size_run": 2, "batch_size": 4, "buffer_size": 8, "test_nepisode": 2, "test_interval": 10**6,
    "log_interval": 20, "runner_log_interval": 20, "learner_log_interval": 20, "checkpoint_interval": 0.0,
}  # fmt: skip
NETWORKS: dict[str, Any] = {"rnn_hidden_dim": 8, "mixing_embed_dim": 4, "hypernet_embed": 6}
STAGES: dict[str, Any] = {
    **TINY, **NETWORKS, "run": "default", "deterministic": True, "learner": "nq_graph_learner", "mac": "gnn_graph_mac",
    "agent": "gnn_rnn", "gnn_hidden_dim": 8, "gnn_layer_num": 1,
    "tokenizer_config": {
        "n_codes": 8, "code_dim": 4, "hidden_dim": 8, "n_layers": 1, "dropout": 0.2, "ema_decay": 0.5,
        "commitment": 0.25, "dead_code_threshold": 0.2, "revive_interval": 1,
    },
    "mask_predictor_config": {
        "d_model": 8, "n_layers": 1, "n_heads": 2, "feedforward_dim": 8, "dropout": 0.2, "matching": "type",
        "stacked_steps": 2, "stacked_strip": 2, "use_gru": True, "last_seen": True, "code_features": True,
        "decode": "argmax",
    },
    "graph_pretrain_epochs": 2, "graph_pretrain_episodes": 4, "graph_pretrain_batch_size": 2,
    "graph_pretrain_eval_interval": 1, "graph_pretrain_eval_episodes": 2, "graph_pretrain_test_episodes": 2,
    "graph_frames_at_once": 64,
}  # fmt: skip
SNAKES: dict[str, Any] = {**TINY, "ticks_per_iteration": 20, "buffer_size": 60, "rnn_hidden_dim": 8}
TOKENIZER = {"pretrained_tokenizer_path": "all stages/models/pretrain_stage1_best"}
PRETRAINED = {**TOKENIZER, "pretrained_mask_predictor_path": "all stages/models/pretrain_stage2_best"}


class Run:
    """One short run.

    Args:
        config, env: names of its files. values: values by key. needs: {key: "run" or "run/place"}, paths of earlier
            runs. makes: patterns of files in its folder.
    """

    def __init__(
        self, config: str, env: str, *shared: dict[str, Any], needs: Any = (), makes: tuple[str, ...] = (), **own: Any
    ) -> None:
        self.config, self.env, self.needs, self.makes = config, env, dict(needs), makes
        self.values = {key: value for part in (*shared, own) for key, value in part.items()}


RUNS: dict[str, Run] = {
    "one process, everything logged": Run(
        "qmix", "matrix_game", TINY, name="mine", unique_token="token", seed=5, use_cuda=False, use_ddp=False,
        run="ddp", deterministic=True, torch_threads=2, t_max=24, updates_per_iteration=2, gamma=0.9, td_lambda=0.0,
        double_q=False, lr=1e-4, grad_norm_clip=1.0, target_update_interval=3, mixer="vdn", agent="rnn",
        obs_agent_id=False, obs_last_action=False, accumulate=2, use_tensorboard=True, profile=True,
        log_video=True, log_memory_usage=True, log_detail="full", distributed_debug=True, epsilon_start=0.9,
        epsilon_finish=0.1, epsilon_anneal_time=50, absolute_episodes=3,
        save_model_interval=10, max_checkpoints_to_keep=3, keep_checkpoints=True,
        auto_resume=True, auto_resume_wait=0.1, resume="lossy",
        share_parameters=False, buffer_cpu_only=False, cpu_inference=True, env_args={"payoff": "monotonic"},
        makes=("tb/*/events*", "replays/test_*.gif", "profile/*", "models/*/agent.th", "checkpoints/*/manifest.json"),
    ),
    "seeds, nothing saved": Run(
        "vdn", "memory_game", TINY, NETWORKS, seeds=(2,), t_max=16, runner="episode", batch_size_run=1, mixer="qmix",
        use_layer_norm=True, use_orthogonal=True, target_update_updates=2, enable_checkpointing=False,
        save_model=False, action_selector="greedy", use_wandb=True, wandb_project="mine", wandb_entity="team",
        wandb_naming="published",
        makes=("wandb/offline-run*/*.wandb",),
    ),
    "16 bits, in processes": Run(
        "qmix", "matrix_game", TINY, NETWORKS, t_max=16, precision="bf16", acting_precision="bf16", q_lambda=True,
        optimizer="rmsprop",
        runner="stream", env_processes=True, lr_scaling="sqrt",
    ),
    "on the agents' device": Run(
        "qmix", "skirmish", TINY, NETWORKS, t_max=60, runner="resident", buffer_cpu_only=False, log_video=True,
        graph_updates=True, resident_slots=1, env_args={"map_name": "3m", "start": "mixed", "sight_range": 6},
        makes=("replays/test_*.gif",),
    ),
    "groups": Run(
        "rloo", "matrix_game", TINY, t_max=18, buffer_size=5000, rnn_hidden_dim=8, group_size=2, graph_updates=True,
        enable_dynamic_sampling=True, max_sampling_attempts=1, test_greedy=False,
    ),
    "snakes by DDPG": Run(
        "snakes_ddpg", "snakes", SNAKES, deterministic=True, max_episodes=2, critic_lr=1e-3, tau=0.01,
        gumbel_softmax=True, epsilon_speed=0.99, epsilon_start=0.4, opponent_difficulty_strategy="curriculum",
        opponent_order="published", enable_opponent_evasion=True, opponent_evasion_start_episode=1, log_interval=200,
    ),
    "snakes against themselves": Run(
        "snakes_ddpg", "snakes", SNAKES, t_max=440, runner="ticks", opponent_difficulty_strategy="self_play",
        opponent_pool_size=2, opponent_pool_interval=3,
    ),
    "all stages": Run(
        "omagd_small", "skirmish", STAGES, t_max=60, save_pretrain_buffer=True,
        graph_lr=1e-3, use_graph_reconstruction=True, enable_gradient_checkpointing=True, env_args={"map_name": "3m"},
        makes=("pretrain_buffer/rank_0.episodes", "models/pretrain_stage1_best/tokenizer.th", "plots/*.png"),
    ),
    "stage 1 on given episodes": Run(
        "omagd_small", "skirmish", STAGES, reconstructer_stage="stage1", graph_pretrain_policy="random",
        needs={"pretrain_buffer_path": "all stages/pretrain_buffer"},
    ),
    "a plain team": Run("fog_baseline", "skirmish", STAGES, t_max=40, env_args={"map_name": "3m"}),
    "stage 2 alone": Run(
        "omagd_small", "skirmish", STAGES, pretrain_only=True,
        needs={**TOKENIZER, "graph_pretrain_policy": "a plain team"},
        makes=("models/pretrain_stage2_best/*.th",),
    ),
    "stage 3 alone": Run(
        "omagd_small", "skirmish", STAGES, t_max=40, recontructer_stage="stage3",
        needs=PRETRAINED,
    ),
    "the upper bound": Run(
        "gnn_qmix", "skirmish", TINY, NETWORKS, t_max=40, use_full_obs=True, gnn_hidden_dim=8
    ),
    "what the team sees": Run(
        "fog_team_obs", "skirmish", TINY, NETWORKS, run="default", t_max=40, use_team_obs=True
    ),
    "what is remembered": Run(
        "fog_baseline", "skirmish", TINY, NETWORKS, run="default", t_max=40, belief_loss="tokens", belief_weight=0.5,
        belief_units="all", belief_every=2, tokenizer_config=STAGES["tokenizer_config"], env_args={"map_name": "3m"},
        graph_pretrain_eval_episodes=2, graph_pretrain_test_episodes=2, needs=TOKENIZER,
        makes=("models/*/belief_head.th", "plots/beliefs.png"),
    ),
    "an evaluation of the graphs": Run(
        "omagd_small", "skirmish", STAGES, evaluation_only=True, eval_report_episodes=2, needs=PRETRAINED
    ),
    "an evaluation of snakes": Run(
        "snakes_ddpg", "snakes", batch_size_run=2, evaluate=True, load_step=400, eval_report_episodes=2,
        save_replay=True, rnn_hidden_dim=8, needs={"checkpoint_path": "snakes by DDPG/models"},
        makes=("replays/episodes.html", "replays/episodes.json.gz"),
    ),
    "maps dealt to ranks": Run(
        "hpn_mappo", "skirmish", TINY, t_max=60, rnn_hidden_dim=8, env_args={"map_name": "3m,4m"},
        task_weights={"4m": 2.0}, task_dealing="sharded", enable_task_sharding=True, balance_tasks_across_gpus=False,
        min_tasks_per_gpu=2, sync_every_n_steps=2, buffer_size=5000,
    ),
    "two ranks": Run(
        "qmix", "matrix_game", TINY, NETWORKS, t_max=16, run="ddp", world_size=2, ddp_port=23455, dist_backend="gloo",
        use_per=True, per_alpha=0.5, per_beta=1.0, standardise_rewards=True,
        dist_timeout_minutes=1.0, max_restarts=0, bucket_cap_mb=1.0, lr_scaling="linear", makes=("logs/rank_1.log",),
    ),
}  # fmt: skip

# Keys that no short run can set: need a GPU or a component of a package. Others test them.
ELSEWHERE = {
    "max_memory_per_gpu_gb", "learner_args", "agent_args", "mixer_args", "mask_predictor_config.kind",
}  # fmt: skip


def flat(values: dict[str, object]) -> dict[str, object]:
    """Return the values by dotted key."""
    plain = {key: value for key, value in values.items() if key not in SECTIONS}
    return plain | {f"{key}.{name}": values[key][name] for key in SECTIONS for name in values.get(key, {})}


def test_every_key_has_a_run_with_a_value_that_is_not_its_default():
    default = flat(read_yaml(HERE / "default.yaml"))
    given = {"env", "local_results_path"}  # of the runs' files and of where they go
    for run in RUNS.values():
        values = flat({**run.values, **run.needs})
        given |= {key for key, value in values.items() if value != default[key]}
    assert set(known_keys()) - given == ELSEWHERE


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("every_key")


@pytest.fixture
def any_machine(monkeypatch):
    """Allow bf16 on processors without them: slow, and the same code."""
    monkeypatch.setattr(machine, "processor_features", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def folder_of(name: str, place: Path) -> Path:
    (config,) = (place / name.replace(" ", "_")).glob("*/config.json")
    return config.parent


@pytest.mark.processes
@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_these_values_completes(name, place, any_machine, monkeypatch):
    run, found = RUNS[name], {}
    monkeypatch.setattr(processes, "start_method", lambda: "fork")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for key, where in run.needs.items():
        earlier, _, inner = where.partition("/")
        found[key] = os.path.relpath(folder_of(earlier, place) / inner)
    results = {"local_results_path": str(place / name.replace(" ", "_"))}
    assert omagd.run(resolve(run.config, run.env, {**run.values, **found, **results}))["exit_state"] == "completed"
    folder = folder_of(name, place)
    kept = json.loads((folder / "config.json").read_text())
    assert all(os.path.isabs(kept[key]) for key in run.needs if key in PRETRAINED), "it may go on from elsewhere"
    missing = [pattern for pattern in run.makes if not list(folder.glob(pattern))]
    assert missing == [], sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
