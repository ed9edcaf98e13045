"""Typed `env_args` of `env=sc2_v2`: SMACv2's published keys with SMACv2's defaults, and those that PyMARL3 adds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from omagd.envs.battle.args import SmacArgs
from omagd.envs.battle.maps import TYPE_ORDER, MapSpec
from omagd.envs.battle.variant import Variant
from omagd.utils.errors import UserError, nearest

LIMIT = 200
RACES = {"10gen_terran": "T", "10gen_protoss": "P", "10gen_zerg": "Z"}
FIELD = "32x32_flat"  # the game's file of all these maps


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TeamArgs(_Part):
    """`capability_config.team_gen`: who fights.

    Attributes:
        dist_type: each unit's type is drawn by its weight.
        unit_types, weights: the types and their shares of 1.
        exception_unit_types: types that cannot make up a whole team.
        observe: agents see the types of their allies.
    """

    dist_type: Literal["weighted_teams"] = "weighted_teams"
    unit_types: tuple[str, ...]
    weights: tuple[float, ...]
    exception_unit_types: tuple[str, ...] = ()
    observe: bool = True

    @model_validator(mode="after")
    def _check(self) -> TeamArgs:
        if len(self.unit_types) != len(self.weights) or abs(sum(self.weights) - 1) > 1e-6 or min(self.weights) < 0:
            raise ValueError("weights must be one for each of unit_types and add up to 1")
        if all(kind in self.exception_unit_types for kind in self.unit_types):
            raise ValueError("exception_unit_types must leave a type that can make up a team")
        return self


class StartArgs(_Part):
    """`capability_config.start_positions`: where.

    Attributes:
        dist_type: `surrounded` (allies in the middle, up to four groups of enemies on the diagonals),
            `reflect_position` (allies anywhere in the left half, enemies mirrored), or one or the other at random.
        p: share of `reflect_position` in the mixture.
        map_x, map_y: size of the field.
        n_enemies: as PyMARL3 has it; `capability_config.n_enemies` comes first.
    """

    dist_type: Literal["surrounded", "reflect_position", "surrounded_and_reflect"] = "surrounded_and_reflect"
    p: float = Field(default=0.5, ge=0, le=1)
    map_x: int = Field(default=32, gt=2)
    map_y: int = Field(default=32, gt=2)
    n_enemies: int | None = Field(default=None, ge=1)


class CapabilityArgs(_Part):
    """`capability_config`: what is drawn anew for each battle.

    Attributes:
        n_units, n_enemies: how many allies and enemies; as many enemies as allies if null.
        team_gen, start_positions: who, and where; without `start_positions` each side starts at one place.
    """

    n_units: int = Field(default=5, ge=1)
    n_enemies: int | None = Field(default=None, ge=1)
    team_gen: TeamArgs = TeamArgs(
        unit_types=("marine", "marauder", "medivac"), weights=(0.45, 0.45, 0.1), exception_unit_types=("medivac",)
    )
    start_positions: StartArgs | None = StartArgs()

    @property
    def enemies(self) -> int:
        """How many enemies there are."""
        beside = self.start_positions.n_enemies if self.start_positions is not None else None
        return self.n_enemies or beside or self.n_units


class SmacV2Args(SmacArgs):
    """`env_args` of `env=sc2_v2`.

    Attributes:
        map_name: `10gen_terran`, `10gen_protoss` or `10gen_zerg`; all are played on the field `32x32_flat`.
        capability_config: teams and start positions.
        conic_fov: agents see and attack only what lies in the sector that they look at.
        num_fov_actions: sectors of the full circle; with `conic_fov` an action for each turns the view.
        change_fov_with_move: PyMARL3's: four sectors, and moving that way turns the view; no actions for it.
        obs_own_pos: agents see where on the map they stand.
        obs_starcraft: observations show anything at all; only True is played.
        use_unit_ranges: each unit type has its own sight and reach; False: 9 and 6 for all, as in SMAC.
        min_attack_range: smallest reach with `use_unit_ranges`.
        prob_obs_enemy: chance that an agent is told of an enemy that another has found (see `obs_order_fix`).
        action_mask: attacks out of reach are not available; False: they are, and do nothing.
        fully_observable: range and sector hide nobody from the observations.
        kill_unit_step_mul: has no effect; accepted because the published files have it.
        obs_order_fix: an agent sees whoever is in its sight. False, as SMACv2: agents are looked at in a random order,
            which follows from the episode's seed; an enemy that nobody looked at before has found hides, from those
            looked at earlier, itself and all enemies before it.
        reward_scale_fix: each battle's rewards are scaled by its own enemies. False, as SMACv2: by those of the first
            battle that the environment has played.
        reward_shield_fix: always True, as in SMACv2.
    """

    map_name: str = "10gen_terran"
    capability_config: CapabilityArgs = CapabilityArgs()
    conic_fov: bool = False
    num_fov_actions: int = Field(default=12, ge=2)
    change_fov_with_move: bool = False
    obs_own_pos: bool = False
    obs_starcraft: Literal[True] = True
    use_unit_ranges: bool = False
    min_attack_range: float = Field(default=2, ge=0)
    prob_obs_enemy: float = Field(default=1.0, ge=0, le=1)
    action_mask: bool = True
    fully_observable: bool = False
    kill_unit_step_mul: int = 2
    obs_order_fix: bool = False
    reward_scale_fix: bool = False
    reward_shield_fix: Literal[True] = True

    @property
    def n_sectors(self) -> int:
        """Directions that an agent can look in; 0 where it looks in all at once."""
        return (4 if self.change_fov_with_move else self.num_fov_actions) if self.conic_fov else 0

    @property
    def variant(self) -> Variant:
        """What stands where."""
        return Variant(
            n_turns=0 if self.change_fov_with_move else self.n_sectors,
            own_place=self.obs_own_pos,
            direction=self.conic_fov,
            ally_types=self.capability_config.team_gen.observe,
            padded_time=False,
        )


def v2_map(args: SmacV2Args) -> MapSpec:
    """Return the map; its units are placeholders. Errors: UserError for another map or units of another race."""
    name, config = args.map_name, args.capability_config
    if name not in RACES:
        raise UserError(f"env_args.map_name={name} is no map of env=sc2_v2.{nearest(name, RACES)}", " ".join(RACES))
    kind = f"{name.removeprefix('10gen_')}_gen"
    for unit in config.team_gen.unit_types:
        if unit not in TYPE_ORDER[kind]:
            known = " ".join(TYPE_ORDER[kind])
            raise UserError(f"env_args.capability_config.team_gen.unit_types: {unit} is not of {name} ({known})")
    units, race = TYPE_ORDER[kind][:1], RACES[name]
    return MapSpec(name, units * config.n_units, units * config.enemies, LIMIT, race, race, 3, kind, file=FIELD)
