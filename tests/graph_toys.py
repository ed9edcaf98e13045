"""Small made-up battles and graph modules for the tests of graphs and pre-training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.loading import resolve
from omagd.config.schema import Config, MaskPredictorConfig
from omagd.learners import PREDICTORS
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.graph_reconstructers import REGISTRY
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.modules.graph_reconstructers.predictor import MaskPredictor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import Episode

LAYOUT = EntityLayout(move_dim=2, n_enemies=3, enemy_dim=5, n_allies=2, ally_dim=4, own_dim=1)
INFO = EnvInfo("toy", "tiny", 3, 6, LAYOUT.obs_dim, 7, episode_limit=12, n_normal_actions=3, layout=LAYOUT)
SMALL: dict[str, Any] = {
    "tokenizer_config.n_codes": 12, "tokenizer_config.code_dim": 4, "tokenizer_config.hidden_dim": 8,
    "tokenizer_config.dropout": 0.0, "tokenizer_config.revive_interval": 2,
    "mask_predictor_config.d_model": 8, "mask_predictor_config.n_layers": 2, "mask_predictor_config.n_heads": 2,
    "mask_predictor_config.feedforward_dim": 16, "mask_predictor_config.dropout": 0.0,
    "mask_predictor_config.stacked_steps": 2, "mask_predictor_config.stacked_strip": 2,
    "mask_predictor_config.last_seen": True, "mask_predictor_config.code_features": True,
    "graph_pretrain_epochs": 100, "graph_lr": 0.003,
}  # fmt: skip


def toy_config(**changes: Any) -> Config:
    """Return a configuration of tiny modules. changes: section__key=value; the predictor's keys need no section."""
    full = {f"mask_predictor_config.{k}" if k in MaskPredictorConfig.model_fields else k: v for k, v in changes.items()}
    return resolve("omagd_small", "skirmish", {**SMALL, **{name.replace("__", "."): full[name] for name in full}})


def toy_modules(config: Config, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tokenizer, Any]:
    """Return fresh modules, the same for the same seed."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer(config.tokenizer_config, LAYOUT).to(dtype)
    n_codes = config.tokenizer_config.n_codes
    if (kind := config.mask_predictor_config.kind) != "masked":
        return tokenizer, REGISTRY.get(kind).new_predictor(config, INFO).to(dtype)
    predictor = MaskPredictor(config.mask_predictor_config, n_codes, LAYOUT, INFO.episode_limit).to(dtype)
    predictor.bind(tokenizer.table())
    return tokenizer, predictor


def graph_learner(stage: str, dtype: torch.dtype = torch.float64, dist: Dist | None = None, **changes: Any) -> Any:
    """Return the learner of "stage1" or "stage2" over fresh modules."""
    config = toy_config(**changes)
    tokenizer, predictor = toy_modules(config, dtype)
    if stage == "stage1":
        return TokenizerLearner(tokenizer, config, INFO, dist or Dist())
    return PREDICTORS.get(config.mask_predictor_config.kind)(predictor, tokenizer, config, INFO, dist or Dist())


def toy_episodes(n: int, seed: int = 0, longest: int = 12, apart: bool = False) -> list[Episode]:
    """Return ragged episodes in which units die one after another and hide at random.

    apart: from generators of their own.
    """
    rng = np.random.default_rng(seed)
    if apart:
        lengths, own = rng.integers(1, longest + 1, n), [np.random.default_rng([seed, i]) for i in range(n)]
        return [_episode(each, int(length), each) for each, length in zip(own, lengths, strict=True)]
    return [_episode(rng, int(rng.integers(1, longest + 1)), np.random.default_rng([seed, i])) for i in range(n)]


def _episode(rng: np.random.Generator, length: int, acting: np.random.Generator) -> Episode:
    rows, n, m = length + 1, INFO.n_agents, LAYOUT.n_enemies
    death = rng.integers(0, 2 * rows, n + m)
    alive = np.arange(rows)[:, None] < death
    alive[0] = True
    full = np.zeros((rows, n, LAYOUT.n_nodes, LAYOUT.node_dim), np.float32)
    obs = np.zeros_like(full)
    for agent in range(n):
        others = [a for a in range(n) if a != agent] + list(range(n, n + m))
        values = rng.normal(0, 1, full.shape[:1] + full.shape[2:]).astype(np.float32)
        there = np.concatenate([np.ones((rows, 1), bool), alive[:, others]], 1) & alive[:, agent, None]
        values = np.where(there[..., None], values, np.float32(0))
        shown = rng.random((rows, LAYOUT.n_nodes)) < 0.6
        shown[:, 0] = True
        full[:, agent], obs[:, agent] = values, np.where(shown[..., None], values, np.float32(0))
    shown_and_true = {"obs": obs, "full_obs": full}
    made = {
        name: GraphTables(LAYOUT, torch.device("cpu")).obs(torch.from_numpy(nodes))
        for name, nodes in shown_and_true.items()
    }
    return {**made, "actions": torch.from_numpy(acting.integers(0, INFO.n_actions, (rows, n)))}
