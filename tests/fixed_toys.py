"""A full replay, draws from it, and the methods whose updates have fixed shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ddpg_toys import random_steps
from q_toys import GRAPH, INFO, foggy, random_episode

from omagd.resident.replay import ResidentBuffer, StagedBuffer

CPU = torch.device("cpu")
ROWS, HELD, BATCH = INFO.episode_limit + 1, 12, 5


def replay(
    device: torch.device | str = CPU, longest: int = INFO.episode_limit,
    kind: type[ResidentBuffer | StagedBuffer] = ResidentBuffer, rank: int = 0,
) -> Any:  # fmt: skip
    """Return a full buffer of episodes of different lengths, of which one was replaced by a shorter one."""
    buffer = kind(HELD, device, ROWS)
    lengths = [longest, *np.random.default_rng(3 + rank).integers(1, longest, HELD)]
    for seed, length in enumerate(lengths, start=100 * rank):
        buffer.add([foggy(random_episode(seed, int(length), truncated=seed % 3 == 0))])
    return buffer


def steps_replay(device: torch.device | str = CPU, longest: int = 9) -> ResidentBuffer:
    """Return a full buffer of what DDPG learns from."""
    buffer = ResidentBuffer(HELD, device, longest + 1)
    for seed, length in enumerate([longest, *np.random.default_rng(3).integers(0, longest, HELD - 1)]):
        buffer.add(random_steps(seed, 1, int(length)))
    return buffer


def draws(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.choice(HELD, BATCH, replace=False).tolist() for _ in range(count)]


CODES = {f"tokenizer_config.{key}": size for key, size in (("n_codes", 6), ("code_dim", 4), ("hidden_dim", 8))}
DDPG: dict[str, dict[str, Any]] = {
    "plain": {}, "gumbel in parts": {"gumbel_softmax": True, "accumulate": 2}, "bicnet": {"agent": "bicnet"},
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "qmix": {},
    "qmix, no lambda, single Q, layer norm": {
        "td_lambda": 0.0, "double_q": False, "use_layer_norm": True, "use_orthogonal": True,
    },
    "vdn": {"mixer": "vdn", "td_lambda": 0.8, "agent": "rnn"},
    "independent": {"mixer": "none", "td_lambda": 0.8, "share_parameters": False},
    "in parts": {"accumulate": 3, "td_lambda": 0.8},
    "beliefs": {"belief_loss": "features", "td_lambda": 0.8},
    "all beliefs in parts": {"belief_loss": "features", "belief_units": "all", "belief_every": 1, "accumulate": 2},
    "tokens": {"belief_loss": "tokens", "pretrained_tokenizer_path": "given", **CODES},
    "without memory": {"agent": "ff", "td_lambda": 0.8},
    "graphs": {"mac": "gnn_graph_mac", "agent": "gnn_rnn", **GRAPH},
    "units": {"agent": "hpn_rnn", "mixer": "set_qmix", "obs_agent_id": False},
    "optimistic weights": {"learner": "wqmix_learner", "td_lambda": 0.8, "share_parameters": False},
    "central weights": {"learner": "wqmix_learner", "learner_args": {"weighting": "central"}, "accumulate": 2},
    "qplex": {"mixer": "qplex", "mixer_args": {"n_heads": 2}},
    "recomputed": {"enable_gradient_checkpointing": True, "td_lambda": 0.8},
    "qatten": {"mixer": "qatten", "mixer_args": {"n_heads": 2}},
    "attention": {"agent": "attention_rnn", "obs_agent_id": False, "rnn_hidden_dim": 8},
}  # fmt: skip
