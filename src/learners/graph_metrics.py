"""Metrics of stages 1 and 2, as sums and counts, and metrics derived from their means.

Shapes: P nodes, M masked tokens, N nodes of a graph, D features, K codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from omagd.config.env_info import ALLY, ENEMY, SELF
from omagd.learners.synced_optimizer import Stats
from omagd.modules.graph_reconstructers.predictor import Guess
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer

TYPE_NAMES = {SELF: "self", ALLY: "ally", ENEMY: "enemy"}
TOP = (1, 3, 5)


def mean_of(values: Tensor, where: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (sum, count) of `values`, only `where` (bool) if given."""
    if where is None:
        return values.sum(), torch.tensor(float(values.numel()), device=values.device)
    return (values * where).sum(), where.sum().to(values.dtype)


def node_stats(truth: Tensor, decoded: Tensor, position: Tensor, tokenizer: Tokenizer, *, detailed: bool) -> Stats:
    """Return the reconstruction quality of nodes [P, D]: `mse` (mean over a node's features) and `cosine`.

    detailed: also `mse_<type>` and `mse_<type>_f<i>` for each type and feature.
    """
    truth = truth.to(decoded.dtype)
    real = tokenizer.real[position].to(decoded.dtype)
    square = (decoded - truth).square() * real
    error = square.sum(-1) / real.sum(-1).clamp(min=1)
    stats = {"mse": mean_of(error), "cosine": mean_of(F.cosine_similarity(decoded * real, truth * real, dim=-1))}
    if not detailed:
        return stats
    types = torch.tensor(tokenizer.layout.node_types, device=position.device)[position]
    for kind, name in TYPE_NAMES.items():
        of_kind = types == kind
        stats[f"mse_{name}"] = mean_of(error, of_kind)
        sums, counts = square[of_kind].sum(0), real[of_kind].sum(0)
        exists = tokenizer.real[[at for at, its in enumerate(tokenizer.layout.node_types) if its == kind]].any(0)
        for i in torch.nonzero(exists).flatten().tolist():
            stats[f"mse_{name}_f{i}"] = (sums[i], counts[i])
    return stats


def perplexity_stats(count: Tensor) -> Stats:
    """Return the perplexity exp(-sum of p log p) of code counts [K], and the number of codes in use."""
    share = count.double() / count.sum().clamp(min=1)
    entropy = -(share * share.clamp(min=1e-300).log()).sum()
    one = torch.ones((), dtype=torch.float64, device=count.device)
    return {"perplexity": (entropy.exp(), one), "codes_in_use": ((count > 0).sum().double(), one)}


@dataclass(frozen=True)
class Tokens:
    """Masked tokens of some frames with their true values.

    Attributes:
        target: [M] int64, code or ABSENT = K. truth: [M, D], features (zero where dead). real: [M, D], 1 for features
            that exist, else 0. kind: [M], node type. baselines: simple predictions [M, D] by name.
    """

    target: Tensor
    truth: Tensor
    real: Tensor
    kind: Tensor
    baselines: Mapping[str, Tensor]


def token_stats(log_p: Tensor, guess: Guess, tokens: Tokens, matched: Tensor) -> Stats:
    """Return accuracies, feature errors position by position and after matching, and the errors of the baselines.

    log_p: [M, K + 1]. matched: [M], index of the target that each prediction is compared with after matching.
    """
    own = log_p.gather(1, tokens.target[:, None])
    rank = 1 + (log_p > own).sum(1)
    alive = tokens.target != log_p.shape[1] - 1
    stats: dict[str, tuple[Tensor, Tensor]] = {f"top{k}": mean_of((rank <= k).to(log_p.dtype)) for k in TOP}
    stats["mrr"] = mean_of(1.0 / rank.to(log_p.dtype))
    stats["recall_absent"] = mean_of(guess.absent.to(log_p.dtype), ~alive)
    stats["recall_alive"] = mean_of((~guess.absent).to(log_p.dtype), alive)
    stats["absent_share"] = mean_of((~alive).to(log_p.dtype))
    errors = {"error": feature_error(guess.features, tokens.truth, tokens.real)}
    errors["error_matched"] = feature_error(guess.features, tokens.truth[matched], tokens.real)
    hits = {"accuracy": log_p.argmax(1) == tokens.target, "accuracy_matched": log_p.argmax(1) == tokens.target[matched]}
    errors["error_zeros"] = feature_error(torch.zeros_like(tokens.truth), tokens.truth, tokens.real)
    for name, baseline in tokens.baselines.items():
        errors[f"error_{name}"] = feature_error(baseline, tokens.truth, tokens.real)
    for name, values in {**errors, **{k: v.to(log_p.dtype) for k, v in hits.items()}}.items():
        stats[name] = mean_of(values)
        for kind in (ALLY, ENEMY):
            stats[f"{name}_{TYPE_NAMES[kind]}"] = mean_of(values, tokens.kind == kind)
    stats["error_alive"] = mean_of(errors["error"], alive)
    return stats


def feature_error(guess: Tensor, truth: Tensor, real: Tensor) -> Tensor:
    """Return the mean squared error [M] over the features that exist ([M, D] each)."""
    return ((guess - truth).square() * real).sum(-1) / real.sum(-1).clamp(min=1)


def summarise(values: Mapping[str, float]) -> dict[str, float]:
    """Return the means with derived metrics.

    `balanced_accuracy`: mean of the recalls of ABSENT and alive. `error_rival`: of the better of position mean
    and last seen. `error_ratio`: `error` over it.
    """
    out = dict(values)
    if "recall_absent" in out and "recall_alive" in out:
        out["balanced_accuracy"] = (out["recall_absent"] + out["recall_alive"]) / 2
    baselines = [out[name] for name in ("error_slot_mean", "error_last_seen", "error_last_seen_or_mean") if name in out]
    if baselines:
        out["error_rival"] = min(baselines)
        out["error_ratio"] = out["error"] / max(out["error_rival"], 1e-12)
    return out
