"""The same learning on reconstructed graphs (stage 3)."""

from __future__ import annotations

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.learners.nq_learner import NQLearner
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError


class NQGraphLearner(NQLearner):
    """`NQLearner` for graph controllers: it trains on the reconstructions that were stored when steps were played."""

    def __init__(self, mac: BasicMAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        if info.layout is None:
            raise UserError(
                f"learner={config.learner} needs an environment with an entity layout; env={config.env} has none"
            )
        super().__init__(mac, config, info, dist)
