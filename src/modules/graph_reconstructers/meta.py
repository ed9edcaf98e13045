"""What stands beside the weights of a pre-trained graph module, so that weights of another world are refused."""

from __future__ import annotations

from typing import Any

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.utils.errors import UserError

# Keys that decide the shape of the weights or what they mean; the others may change between stages.
TOKENIZER_SHAPE = ("n_codes", "code_dim", "hidden_dim", "n_layers", "distance")
PREDICTOR_SHAPE = (
    "d_model",
    "n_layers",
    "n_heads",
    "feedforward_dim",
    "stacked_steps",
    "stacked_strip",
    "use_gru",
    "last_seen",
    "code_features",
)
KINDS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "pretrained_tokenizer_path": ("tokenizer", {"tokenizer_config": TOKENIZER_SHAPE}),
    "pretrained_mask_predictor_path": (
        "mask_predictor",
        {"tokenizer_config": ("n_codes",), "mask_predictor_config": PREDICTOR_SHAPE},
    ),
}


def describe(config: Config, info: EnvInfo, *, predictor: bool) -> dict[str, Any]:
    """Return the `meta` entry of a saved tokenizer, or of a saved predictor: plain values."""
    return {
        "kind": "mask_predictor" if predictor else "tokenizer",
        "env": info.name,
        "map_name": info.map_name,
        "shape_key": info.shape_key(),
        "tokenizer_config": config.tokenizer_config.model_dump(),
        "mask_predictor_config": config.mask_predictor_config.model_dump(),
    }


def check(meta: object, config: Config, info: EnvInfo, key: str, path: str) -> None:
    """Refuse weights that do not fit this configuration and environment.

    meta: the file's `meta` entry. key: the configuration key that named the file `path`. Errors: UserError.
    """
    kind, sections = KINDS[key]
    source = f"{key}={path}"
    if not isinstance(meta, dict) or meta.get("kind") != kind:
        raise UserError(f"{source} is not the file of a trained {kind}; give the one that pre-training wrote")
    if meta["shape_key"] != info.shape_key():
        trained, here = f"{meta['env']} {meta['map_name']}".strip(), f"{info.name} {info.map_name}".strip()
        mend = f"give one that was trained on {here}"
        if trained == here:
            mend = "with other sizes; train it again with these env_args"
        raise UserError(f"{source} was trained on {trained}: {mend}")
    there, here = (
        {f"{section}.{name}": values[section][name] for section, names in sections.items() for name in names}
        for values in (meta, config.model_dump())
    )
    differing = [name for name in there if there[name] != here[name]]
    if differing:
        wanted = " ".join(f"{name}={there[name]}" for name in differing)
        given = " ".join(str(here[name]) for name in differing)
        raise UserError(f"{source} was trained with {wanted}, not {given}; set {wanted}")
