"""Stages 1 and 2: graphs of entities, the tokenizer, predictors of unseen units, and reconstruction by them.

`REGISTRY` has the kinds of predictors (`mask_predictor_config.kind`) by what acts with them. A reconstructor names its
module (`predictor_type`), the keys that determine its weights (`shape_keys`), the fields of episodes that training
reads (`training_fields`), the stages that train it (`pretraining`, by default stages 1 and 2), and whether it says how
sure it is (`has_beliefs`, for `belief_inputs`).
`omagd.learners.PREDICTORS` has the learners of the same names.
"""

from __future__ import annotations

from typing import Any

from omagd.config.schema import Config
from omagd.utils.errors import UserError
from omagd.utils.registry import Registry

REGISTRY: Registry[Any] = Registry(
    "mask_predictor_config.kind",
    "omagd.predictors",
    lazy={
        "masked": "omagd.modules.graph_reconstructers.reconstructor:Reconstructor",
        "tracker": "omagd.modules.graph_reconstructers.tracking:TrackingReconstructor",
        "map_constant": "omagd.modules.graph_reconstructers.map_constant:MapConstantReconstructor",
    },
)


def training_fields(config: Config) -> tuple[str, ...]:
    """Return the fields of episodes that stages 1 and 2 keep."""
    fields: tuple[str, ...] = REGISTRY.get(config.mask_predictor_config.kind).training_fields
    return fields


def pretraining(config: Config) -> tuple[str, ...]:
    """Return the stages that train the configured kind of predictor: stage 1 only where it reads tokens."""
    kind = REGISTRY.get(config.mask_predictor_config.kind)
    return tuple(getattr(kind, "pretraining", ("stage1", "stage2")))


def check_beliefs(config: Config) -> None:
    """Reject what a kind of predictor does not say: how sure it is, a distribution to draw from. Errors: UserError."""
    kind = config.mask_predictor_config.kind
    if not config.use_graph_reconstruction:
        return
    if config.mask_predictor_config.decode == "sample" and not hasattr(REGISTRY.get(kind), "renew"):
        raise UserError(
            f"mask_predictor_config.decode=sample: kind={kind} has no distribution to draw from. Use decode=mean"
        )
    if config.belief_inputs and not getattr(REGISTRY.get(kind), "has_beliefs", False):
        raise UserError(
            f"belief_inputs=True: mask_predictor_config.kind={kind} does not say how sure it is. Use another kind, or"
            " belief_inputs=False"
        )
