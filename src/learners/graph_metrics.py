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


def node_stats(
    truth: Tensor, decoded: Tensor, position: Tensor, tokenizer: Tokenizer, counted: Tensor, *, detailed: bool
) -> Stats:
    """Return the reconstruction quality of nodes [P, D]: `mse` (mean over a node's features) and `cosine`.

    counted: [P] bool. detailed: also `mse_<type>` and `mse_<type>_f<i>` for each type and feature, where all count.
    """
    truth = truth.to(decoded.dtype)
    real = tokenizer.real[position].to(decoded.dtype)
    square = (decoded - truth).square() * real
    error = square.sum(-1) / real.sum(-1).clamp(min=1)
    cosine = F.cosine_similarity(decoded * real, truth * real, dim=-1)
    stats = {"mse": mean_of(error, counted), "cosine": mean_of(cosine, counted)}
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
    # exp of the entropy: how many codes would be as uneven if all were used alike (VQ-VAE's usual health check).
    share = count.double() / count.sum().clamp(min=1)
    entropy = -(share * share.clamp(min=1e-300).log()).sum()
    one = torch.ones((), dtype=torch.float64, device=count.device)
    return {"perplexity": (entropy.exp(), one), "codes_in_use": ((count > 0).sum().double(), one)}


@dataclass(frozen=True)
class Tokens:
    """Masked tokens of some frames with their true values.

    Attributes:
        target: [M] int64, code or ABSENT = K. truth: [M, D], features (zero where dead). real: [M, D], 1 for features
            that exist, else 0. kind: [M], node type. code: [M, D], features of the true codes.
    """

    target: Tensor
    truth: Tensor
    real: Tensor
    kind: Tensor
    code: Tensor


def token_stats(log_p: Tensor, guess: Guess, tokens: Tokens, matched: Tensor) -> Stats:
    """Return accuracies and feature errors over all masked tokens, the dead included.

    Errors are means of squares over a node's features.
    `error_all`: position by position. `error_all_matched`: after matching. `error_all_code`: if all codes were right.
    log_p: [M, K + 1]. matched: [M], index of the target that each prediction is compared with after matching.
    """
    own = log_p.gather(1, tokens.target[:, None])
    # Place of the true token among all, 1 for the likeliest; the mean of its inverse is `mrr`.
    rank = 1 + (log_p > own).sum(1)
    alive = tokens.target != log_p.shape[1] - 1
    stats: dict[str, tuple[Tensor, Tensor]] = {f"top{k}": mean_of((rank <= k).to(log_p.dtype)) for k in TOP}
    stats["mrr"] = mean_of(1.0 / rank.to(log_p.dtype))
    stats["recall_absent"] = mean_of(guess.absent.to(log_p.dtype), ~alive)
    stats["recall_alive"] = mean_of((~guess.absent).to(log_p.dtype), alive)
    stats["absent_share"] = mean_of((~alive).to(log_p.dtype))
    errors = {
        name: ((features - truth).square() * tokens.real).sum(-1) / tokens.real.sum(-1).clamp(min=1)
        for name, features, truth in (
            ("error_all", guess.features, tokens.truth),
            ("error_all_matched", guess.features, tokens.truth[matched]),
            ("error_all_code", tokens.code, tokens.truth),
        )
    }
    hits = {"accuracy": log_p.argmax(1) == tokens.target, "accuracy_matched": log_p.argmax(1) == tokens.target[matched]}
    for name, values in {**errors, **{k: v.to(log_p.dtype) for k, v in hits.items()}}.items():
        stats[name] = mean_of(values)
        for kind in (ALLY, ENEMY):
            stats[f"{name}_{TYPE_NAMES[kind]}"] = mean_of(values, tokens.kind == kind)
    return stats


def summarise(values: Mapping[str, float]) -> dict[str, float]:
    """Return the means with `balanced_accuracy`: the mean of the recalls of ABSENT and alive."""
    out = dict(values)
    if "recall_absent" in out and "recall_alive" in out:
        # Most units live: a predictor that never says dead would have a high plain accuracy.
        out["balanced_accuracy"] = (out["recall_absent"] + out["recall_alive"]) / 2
    return out
