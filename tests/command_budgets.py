"""One list of small budgets: appended to any documented command, the command ends in seconds."""

from __future__ import annotations

BUDGETS = (
    "t_max=150", "max_episodes=None", "batch_size_run=2", "batch_size=4", "updates_per_iteration=1", "buffer_size=8",
    "test_nepisode=4", "test_interval=100000", "log_interval=60", "runner_log_interval=60", "learner_log_interval=60",
    "graph_pretrain_epochs=2", "graph_pretrain_episodes=8", "graph_pretrain_batch_size=4",
    "graph_pretrain_eval_episodes=4", "graph_pretrain_test_episodes=4", "graph_pretrain_eval_interval=1",
    "eval_report_episodes=8", "dist_timeout_minutes=2", "use_cuda=False",
    # Sizes too: the weights of one command are what the next one loads.
    "tokenizer_config.n_codes=32", "tokenizer_config.hidden_dim=16", "tokenizer_config.code_dim=8",
    "mask_predictor_config.d_model=16", "mask_predictor_config.n_layers=1", "mask_predictor_config.n_heads=2",
    "mask_predictor_config.feedforward_dim=32", "mask_predictor_config.last_seen=True",
    "mask_predictor_config.code_features=True",
)  # fmt: skip
