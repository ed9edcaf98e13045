"""Stages 1 and 2: graphs of entities, the tokenizer, predictors of unseen units, and reconstruction by them.

`REGISTRY` has the kinds of predictors (`mask_predictor_config.kind`) by what acts with them: a `Reconstructor`
(`reconstructor.py`) that is built as `cls(tokenizer, predictor, config, info)`. Its class makes untrained predictors
(`new_predictor`) and says what it stores (`fields`); the attributes that `Reconstructor` gives defaults say the rest.
One that fills in nothing, but infers what agents read beside their observations, stores it in the field `inferred` and
says how much it is (`n_inferred`). `omagd.learners.PREDICTORS` has the learners of the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.schema import Config
from omagd.modules import agents
from omagd.utils.errors import UserError
from omagd.utils.registry import Registry

if TYPE_CHECKING:
    from omagd.modules.graph_reconstructers.reconstructor import Reconstructor

REGISTRY: Registry[type[Reconstructor]] = Registry(
    "mask_predictor_config.kind",
    "omagd.predictors",
    lazy={"masked": "omagd.modules.graph_reconstructers.token_reconstructor:TokenReconstructor"},
)

INFERRED = "inferred"
"""Field of episodes with what agents read beside their observations (`n_inferred`)."""


def training_fields(config: Config) -> tuple[str, ...]:
    """Return the fields of episodes that stages 1 and 2 keep."""
    return REGISTRY.get(config.mask_predictor_config.kind).training_fields


def pretraining(config: Config) -> tuple[str, ...]:
    """Return the stages that train the configured kind of predictor: stage 1 only where it reads tokens."""
    return REGISTRY.get(config.mask_predictor_config.kind).pretraining


def n_inferred(config: Config, layout: EntityLayout | None) -> int:
    """Return how many inferred numbers each agent reads beside its observation; 0 for kinds that fill in units."""
    if not config.use_graph_reconstruction or layout is None:
        return 0
    return REGISTRY.get(config.mask_predictor_config.kind).n_inferred(layout)


def check_inferences(config: Config, info: EnvInfo) -> None:
    """Reject agents that do not read what a kind of predictor infers. Errors: UserError."""
    if not n_inferred(config, info.layout):
        return
    given = f"mask_predictor_config.kind={config.mask_predictor_config.kind}"
    if not getattr(agents.REGISTRY.get(config.agent), "reads_inferences", False):
        raise UserError(f"{given}: agent={config.agent} does not read what it infers. Use agent=n_rnn, rnn or ff")
