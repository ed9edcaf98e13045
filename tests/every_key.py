"""Short runs that together set every key of the configuration to a value that is not its default.

tests/test_every_key.py executes `RUNS`. Add a new key to one of them, or to `ELSEWHERE` with the test that sets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TINY: dict[str, Any] = {
    "batch_size_run": 2, "batch_size": 4, "buffer_size": 8, "test_nepisode": 2, "test_interval": 10**6,
    "log_interval": 20, "runner_log_interval": 20, "learner_log_interval": 20, "checkpoint_interval": 0.0,
}  # fmt: skip
NETWORKS: dict[str, Any] = {"rnn_hidden_dim": 8, "mixing_embed_dim": 4, "hypernet_embed": 6}
STAGES: dict[str, Any] = {
    **TINY, **NETWORKS, "run": "default", "deterministic": True, "learner": "nq_graph_learner", "mac": "gnn_graph_mac",
    "agent": "gnn_rnn", "gnn_hidden_dim": 8, "gnn_layer_num": 1, "gnn_readout": "entity", "mark_guesses": True,
    "tokenizer_config": {
        "n_codes": 8, "code_dim": 4, "hidden_dim": 8, "n_layers": 1, "dropout": 0.2, "distance": "cosine",
        "ema_decay": 0.5, "commitment": 0.25, "dead_code_threshold": 0.2, "revive_interval": 1,
    },
    "mask_predictor_config": {
        "d_model": 8, "n_layers": 1, "n_heads": 2, "feedforward_dim": 8, "dropout": 0.2, "mask_ratio": 0.3,
        "matching": "type", "early_steps": 1, "early_step_weight": 2.0, "stacked_steps": 2, "stacked_strip": 2,
        "use_gru": True, "last_seen": True, "code_features": True, "decode": "argmax",
    },
    "graph_pretrain_epochs": 2, "graph_pretrain_episodes": 4, "graph_pretrain_batch_size": 2,
    "graph_pretrain_eval_interval": 1, "graph_pretrain_eval_episodes": 2, "graph_frames_at_once": 64,
}  # fmt: skip
SNAKES: dict[str, Any] = {**TINY, "ticks_per_iteration": 20, "buffer_size": 60, "rnn_hidden_dim": 8}
TOKENIZER = {"pretrained_tokenizer_path": "all stages/models/pretrain_stage1_best"}
PRETRAINED = {**TOKENIZER, "pretrained_mask_predictor_path": "all stages/models/pretrain_stage2_best"}


@dataclass(frozen=True)
class Run:
    """One short run.

    Attributes:
        config, env: names of its files. updates: values. needs: {key: "run" or "run/place"}, paths of earlier runs.
        makes: patterns of files in its folder.
    """

    config: str
    env: str
    updates: dict[str, Any]
    needs: dict[str, str]
    makes: tuple[str, ...] = ()


def run(config: str, env: str, *shared: dict[str, Any], needs: Any = (), makes: Any = (), **own: Any) -> Run:
    updates = {key: value for part in (*shared, own) for key, value in part.items()}
    return Run(config, env, updates, dict(needs), makes)


RUNS: dict[str, Run] = {
    "one process, everything logged": run(
        "qmix", "matrix_game", TINY, name="mine", unique_token="token", seed=5, use_cuda=False, use_ddp=False,
        run="ddp", deterministic=True, torch_threads=2, t_max=24, updates_per_iteration=2, gamma=0.9, td_lambda=0.0,
        double_q=False, lr=1e-4, grad_norm_clip=1.0, target_update_interval=3, mixer="vdn", agent="rnn",
        obs_agent_id=False, obs_last_action=False, accumulate=2, num_workers=1, use_tensorboard=True, profile=True,
        log_memory_usage=True, distributed_debug=True, epsilon_start=0.9, epsilon_finish=0.1, epsilon_anneal_time=50,
        save_model_interval=10, max_checkpoints_to_keep=3, auto_resume=True, auto_resume_wait=0.1, resume="lossy",
        buffer_cpu_only=False, cpu_inference=True, env_args={"payoff": "monotonic"},
        makes=("tb/*/events*", "profile/*", "models/*/agent.th", "checkpoints/*/manifest.json"),
    ),
    "seeds, nothing saved": run(
        "vdn", "memory_game", TINY, NETWORKS, seeds=(2,), t_max=16, runner="episode", batch_size_run=1, mixer="qmix",
        use_layer_norm=True, use_orthogonal=True, target_update_updates=2, enable_checkpointing=False,
        save_model=False, action_selector="greedy", use_wandb=True, wandb_project="mine", wandb_entity="team",
        makes=("wandb/offline-run*/*.wandb",),
    ),
    "16 bits, compiled, in processes": run(
        "qmix", "matrix_game", TINY, NETWORKS, t_max=16, precision="bf16", acting_precision="bf16", compile=True,
        runner="stream", env_processes=True, lr_scaling="sqrt",
    ),
    "snakes by DDPG": run(
        "snakes_ddpg", "snakes", SNAKES, deterministic=True, max_episodes=2, critic_lr=1e-3, tau=0.01,
        gumbel_softmax=True, epsilon_speed=0.99, epsilon_start=0.4, opponent_difficulty_strategy="curriculum",
        opponent_order="published", enable_opponent_evasion=True, opponent_evasion_start_episode=1, log_interval=200,
    ),
    "snakes against themselves": run(
        "snakes_ddpg", "snakes", SNAKES, t_max=440, runner="ticks", opponent_difficulty_strategy="self_play",
        opponent_pool_size=2, opponent_pool_interval=3,
    ),
    "all stages": run(
        "omagd_small", "skirmish", STAGES, t_max=60, save_pretrain_buffer=True, graph_pretrain_random_share=0.5,
        graph_lr=1e-3, use_graph_reconstruction=True, enable_gradient_checkpointing=True, env_args={"map_name": "3m"},
        makes=("pretrain_buffer/rank_0.episodes", "models/pretrain_stage1_best/tokenizer.th", "plots/*.png"),
    ),
    "stage 1 on given episodes": run(
        "omagd_small", "skirmish", STAGES, reconstructer_stage="stage1", graph_pretrain_policy="random",
        needs={"pretrain_buffer_path": "all stages/pretrain_buffer"},
    ),
    "stage 2 alone": run(
        "omagd_small", "skirmish", STAGES, pretrain_only=True,
        needs={**TOKENIZER, "graph_pretrain_policy": "all stages"}, makes=("models/pretrain_stage2_best/*.th",),
    ),
    "stage 3 alone": run(
        "omagd_small", "skirmish", STAGES, t_max=40, recontructer_stage="stage3", needs=PRETRAINED
    ),
    "the upper bound": run(
        "gnn_qmix", "skirmish", TINY, NETWORKS, t_max=40, use_full_obs=True, gnn_hidden_dim=8
    ),
    "an evaluation of the graphs": run(
        "omagd_small", "skirmish", STAGES, evaluation_only=True, eval_report_episodes=2, needs=PRETRAINED
    ),
    "an evaluation of snakes": run(
        "snakes_ddpg", "snakes", batch_size_run=2, evaluate=True, load_step=400, eval_report_episodes=2,
        save_replay=True, rnn_hidden_dim=8, needs={"checkpoint_path": "snakes by DDPG/models"}, makes=("replays/*",),
    ),
    "two ranks": run(
        "qmix", "matrix_game", TINY, NETWORKS, t_max=16, run="ddp", world_size=2, ddp_port=23455, dist_backend="gloo",
        dist_timeout_minutes=1.0, max_restarts=0, bucket_cap_mb=1.0, lr_scaling="linear", makes=("logs/rank_1.log",),
    ),
}  # fmt: skip

# Keys that no short run can set, with the test that sets them.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "use_per": ("is rejected, whatever else is set", "tests/test_config.py"),
    "learner_args": ("needs a component with keys of its own", "tests/test_component_args.py"),
    "agent_args": ("needs a component with keys of its own", "tests/test_component_args.py"),
    "mixer_args": ("needs a component with keys of its own", "tests/test_component_args.py"),
    "max_memory_per_gpu_gb": ("needs a GPU", "tests/test_device.py"),
}
