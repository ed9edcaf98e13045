"""What is saved beside the weights of stages 1 and 2, and the check that loaded weights fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import ACTED_WITH, Config
from omagd.modules.graph_reconstructers import REGISTRY, pretraining
from omagd.modules.graph_reconstructers.predictor import MaskPredictor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.utils.errors import UserError

TOKENIZER_SHAPE = ("n_codes", "code_dim", "hidden_dim", "n_layers", "distance")
"""Keys that determine the tokenizer's weights or their meaning, as `shape_keys` do of predictors; others may change."""

KINDS = "tokenizer", "mask_predictor"
"""Names of the two kinds of files; the second one, as `predictor`, has index 1."""

ENTRIES = {"kind", "env", "map_name", "shape_key", "tokenizer_config", "mask_predictor_config"}
"""Those of a `meta` entry."""

EARLIER = {"mask_predictor_config.kind": "masked", "tokenizer_config.distance": "l2"}
"""Values of keys that files of earlier versions do not have, or that this version does not have any more."""


def describe(config: Config, info: EnvInfo, *, predictor: bool) -> dict[str, Any]:
    """Return the `meta` entry of a saved predictor, or of a saved tokenizer: plain values."""
    return {
        "kind": KINDS[predictor],
        "env": info.name,
        "map_name": info.map_name,
        "shape_key": info.shape_key(),
        "tokenizer_config": config.tokenizer_config.model_dump(),
        "mask_predictor_config": config.mask_predictor_config.model_dump(),
    }


def check(meta: object, config: Config, info: EnvInfo, *, predictor: bool, source: str) -> None:
    """Reject weights of another environment or configuration.

    meta: the file's `meta` entry. predictor: whether it must be a predictor's, else a tokenizer's. source: what the
    user gave, as `key=value`. Errors: UserError.
    """
    kind = KINDS[predictor]
    sections = "tokenizer_config", "mask_predictor_config"
    complete = isinstance(meta, dict) and ENTRIES <= meta.keys() and all(isinstance(meta[n], dict) for n in sections)
    if not isinstance(meta, dict) or not complete or meta["kind"] != kind:
        raise UserError(f"{source} is not the file of a trained {kind}; give the one that pre-training wrote")
    if meta["shape_key"] != info.shape_key():
        trained, here = f"{meta['env']} {meta['map_name']}".strip(), f"{info.name} {info.map_name}".strip()
        fix = f"give one that was trained on {here}"
        if trained == here:
            fix = "with other sizes; train it again with these env_args"
        raise UserError(f"{source} was trained on {trained}: {fix}")
    saved, given = (
        {
            f"{section}.{name}": values[section].get(name, EARLIER.get(f"{section}.{name}"))
            for section, names in _sections(config, predictor).items()
            for name in names
        }
        for values in (meta, config.model_dump())
    )
    differing = [name for name in saved if saved[name] != given[name]]
    for name in ACTED_WITH.keys() & differing:
        raise UserError(
            f"{source} was trained with {name}={saved[name]}, which was removed. Play it with {ACTED_WITH[name]}"
        )
    if differing:
        wanted = " ".join(f"{name}={saved[name]}" for name in differing)
        now = " ".join(str(given[name]) for name in differing)
        raise UserError(f"{source} was trained with {wanted}, not {now}; set {wanted}")


def _sections(config: Config, predictor: bool) -> dict[str, tuple[str, ...]]:
    """Return the keys that the weights of a file depend on, by section of the configuration."""
    if not predictor:
        return {"tokenizer_config": TOKENIZER_SHAPE}
    codes = {"tokenizer_config": ("n_codes",)} if "stage1" in pretraining(config) else {}
    return {**codes, "mask_predictor_config": REGISTRY.get(config.mask_predictor_config.kind).shape_keys}


def require_one_pretraining(tokenizer: Tokenizer, predictor: nn.Module) -> None:
    """Reject a predictor of another tokenizer, whose codes mean other features. Errors: UserError."""
    if not isinstance(predictor, MaskPredictor):
        return  # reads no codes
    # A code's number means nothing by itself; what it decodes to does.
    if not torch.allclose(tokenizer.table(), predictor.table, rtol=1e-3, atol=1e-4):
        raise UserError(
            "pretrained_mask_predictor_path belongs to another tokenizer than pretrained_tokenizer_path;"
            " give the two files of one pre-training"
        )
