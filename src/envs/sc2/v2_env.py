"""The environment `sc2_v2`: SMACv2's battles in the real game, with teams and start positions drawn for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel

from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.semantics import BattleSemantics
from omagd.envs.battle.v2_args import SmacV2Args, v2_map
from omagd.envs.battle.v2_semantics import V2Semantics
from omagd.envs.battle.variant import Variant
from omagd.envs.sc2.sc2_env import UNIT_NAMES, SC2Battle, SC2Env
from omagd.envs.smac import SmacV2Interface

if TYPE_CHECKING:
    from omagd.envs.sc2.backend import GameBackend


class SC2V2Battle(SC2Battle):
    """One slot: SMACv2's semantics over the real game. Teams, places and what agents know follow from reset seeds.

    Args:
        args: the published keys. n_slots: 1.

    Errors: UserError when the game, its version or the map is missing; ValueError for more slots.
    """

    args_model: ClassVar[type[BaseModel]] = SmacV2Args
    name: ClassVar[str] = "sc2_v2"
    args: SmacV2Args

    @staticmethod
    def _battle_of(args: SmacV2Args) -> tuple[MapSpec, Variant]:
        return v2_map(args), args.variant

    def _new_backend(self) -> GameBackend:
        from omagd.envs.sc2.v2_backend import V2Backend  # pysc2 takes its time

        return V2Backend(self.spec, self.args)

    def _new_semantics(self, backend: GameBackend) -> BattleSemantics:
        return V2Semantics(self.spec, self.args, backend, UNIT_NAMES)


class SC2V2Env(SmacV2Interface, SC2Env):
    """`SC2V2Battle` as the field's single environment; the thread that resets it first must outlive the game.

    Args:
        args: the published keys.
    """

    args_model: ClassVar[type[BaseModel]] = SmacV2Args
    battle: ClassVar[type[SC2Battle]] = SC2V2Battle
