"""A full replay, draws from it, and the methods whose updates have fixed shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ddpg_toys import INFO as OF_SNAKES
from ddpg_toys import random_steps
from q_toys import BOXED, GRAPH, INFO, foggy, random_episode
from torch.nn import functional as F

from omagd.components.data import GroupData, OnPolicyData
from omagd.components.episode_buffer import UNLIMITED, EpisodeBuffer
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.resident.replay import ResidentBuffer, StagedBuffer
from omagd.utils.packing import EpisodeMeta, RecordedEpisode

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


def steps_replay(
    device: torch.device | str = CPU, longest: int = 9, info: EnvInfo = OF_SNAKES, **_: object
) -> ResidentBuffer:
    """Return a full buffer of what DDPG learns from."""
    buffer = ResidentBuffer(HELD, device, longest + 1)
    for seed, length in enumerate([longest, *np.random.default_rng(3).integers(0, longest, HELD - 1)]):
        buffer.add(random_steps(seed, 1, int(length), info=info))
    return buffer


def draws(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.choice(HELD, BATCH, replace=False).tolist() for _ in range(count)]


CODES = {f"tokenizer_config.{key}": size for key, size in (("n_codes", 6), ("code_dim", 4), ("hidden_dim", 8))}
DDPG: dict[str, dict[str, Any]] = {
    "plain": {}, "bicnet": {"agent": "bicnet"},
    "gumbel in parts": {"gumbel_softmax": True, "accumulate": 2, "standardise_rewards": True},
    "matd3": {"info": BOXED, "accumulate": 2, "learner_args": {
        "joint": True, "twin": True, "target_noise": 0.2, "policy_delay": 2,
    }},
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "qmix": {},
    "qmix, no lambda, single Q, layer norm": {
        "td_lambda": 0.0, "double_q": False, "use_layer_norm": True, "use_orthogonal": True,
    },
    "vdn": {"mixer": "vdn", "td_lambda": 0.8, "agent": "rnn"},
    "independent": {"mixer": "none", "td_lambda": 0.8, "share_parameters": False},
    "in parts": {
        "accumulate": 3, "td_lambda": 0.8, "q_lambda": True, "optimizer": "rmsprop", "standardise_rewards": True,
    },
    "beliefs": {"belief_loss": "features", "td_lambda": 0.8},
    "all beliefs in parts": {"belief_loss": "features", "belief_units": "all", "belief_every": 1, "accumulate": 2},
    "tokens": {"belief_loss": "tokens", "pretrained_tokenizer_path": "given", **CODES},
    "without memory": {"agent": "ff", "td_lambda": 0.8},
    "graphs": {"mac": "gnn_graph_mac", "agent": "gnn_rnn", **GRAPH},
    "units": {"agent": "hpn_rnn", "mixer": "set_qmix", "obs_agent_id": False},
    "optimistic weights": {"learner": "wqmix_learner", "td_lambda": 0.8, "q_lambda": True, "share_parameters": False},
    "central weights": {"learner": "wqmix_learner", "learner_args": {"weighting": "central"}, "accumulate": 2},
    "qplex": {"mixer": "qplex", "mixer_args": {"n_heads": 2}},
    "recomputed": {"enable_gradient_checkpointing": True, "td_lambda": 0.8},
    "qatten": {"mixer": "qatten", "mixer_args": {"n_heads": 2}},
    "images": {"agent": "cnn_rnn", "td_lambda": 0.8},
    "talking": {"agent": "tarmac", "td_lambda": 0.8},
    "attention": {"agent": "attention_rnn", "obs_agent_id": False, "rnn_hidden_dim": 8},
}  # fmt: skip

PPO = {"learner": "ppo_learner", "action_selector": "softmax", "mixer": "none"}
GROUPS = {**PPO, "learner": "rloo_learner", "group_size": 2}
PQN = {"learner": "pqn_learner"}
IN_PARTS = {"epochs": 2, "minibatches": 3}
ON_POLICY: dict[str, dict[str, Any]] = {
    "mappo": {**PPO, "agent": "n_rnn", "learner_args": {**IN_PARTS, "anneal_lr": True}, "t_max": 400},
    "ippo": {**PPO, "share_parameters": False, "learner_args": {"epochs": 2, "critic": "observation"}},
    "hpn_mappo": {**PPO, "agent": "hpn_rnn", "obs_agent_id": False, "accumulate": 2, "learner_args": {
        **IN_PARTS, "critic": "set", "death_masking": False, "value_clip": 0.01,
    }},
    "mappo, beliefs": {**PPO, "belief_loss": "features", "belief_every": 2, "accumulate": 2, "learner_args": IN_PARTS},
    "ppo, tokens": {**PPO, **METHODS["tokens"], "learner_args": {"normalise_values": False}},
    "rloo": {**GROUPS, "enable_dynamic_sampling": True, "learner_args": IN_PARTS},
    "rloo, returns": {**GROUPS, "learner_args": {**IN_PARTS, "score": "return", "normalise_advantages": True}},
    "pqn_vdn": {**PQN, "mixer": "vdn", "td_lambda": 0.65, "use_layer_norm": True, "learner_args": IN_PARTS},
    "pqn": {**PQN, "accumulate": 2, "belief_loss": "features", "learner_args": {"epochs": 2}},
    "pqn, independent": {**PQN, "mixer": "none", "learner_args": {**IN_PARTS, "anneal_lr": True}, "t_max": 400},
}  # fmt: skip


def data_of(config: Config, buffer: EpisodeBuffer) -> OnPolicyData:
    """Return the source of on-policy batches, of fixed shapes where the buffer has them."""
    read = getattr(buffer, "whole", buffer.batch)
    return (GroupData if config.group_size > 1 else OnPolicyData)(config, buffer, read)


def growing(device: torch.device | str = CPU) -> ResidentBuffer:
    return ResidentBuffer(UNLIMITED, device, ROWS)


def iterations() -> list[list[RecordedEpisode]]:
    """Return the episodes of six iterations, in groups of two: different numbers and lengths.

    In the third nobody has a choice in half of the episodes, and all groups end as one; in the last one most are short.
    """
    made, rng = [], np.random.default_rng(1)
    for number, count in enumerate((4, 18, 4, 12, 40, 6)):
        episodes = []
        for place in range(count):
            length = int(rng.integers(1, 4 if number == 5 else INFO.episode_limit + 1))
            episode = foggy(random_episode(100 * number + place, length, truncated=place % 3 == 0))
            if number == 2 and place % 2:
                episode["avail_actions"] = torch.zeros_like(episode["avail_actions"])
                episode["avail_actions"][..., 0], episode["actions"] = 1, torch.zeros_like(episode["actions"])
            else:  # an agent that dies
                late = slice(1 + place % 3, None)
                episode["avail_actions"][late, place % 3] = F.one_hot(
                    episode["actions"][late, place % 3].long(), 9
                ).byte()
            won = float(number == 2 or rng.random() < 0.5)
            episodes.append(RecordedEpisode(episode, EpisodeMeta(seed=place // 2, group=str(place // 2), outcome=won)))
        made.append(episodes)
    return made
