"""Typed `env_args` of the battle environments: the published keys and defaults of SMAC, SMACv2 and PyMARL3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from omagd.envs.battle.maps import FORMATION, HEALING, SIGHT_RANGE, TYPE_ORDER, MapSpec, named_fog, spec_of
from omagd.utils.errors import UserError, unknown_name

N_NORMAL_ACTIONS = 6  # SMAC's actions without a target
POLICIES = ("random", "attack_nearest", "focus_fire", "kiting")  # scripted ones of `skirmish`


# SMACv2's random starts.
REFLECTED_SHARE = 0.5  # of the battles; the others are surrounded
MOST_GROUPS = 4  # of enemies, each on its own diagonal
OFFSET = 2.0  # distance of the diagonals from the centre: enemies do not appear on top of allies
BUFFER = 1.0  # between the middle of the field and the allies


@dataclass(frozen=True)
class Variant:
    """Differences between SMAC and SMACv2 in actions, observations and state; the defaults are SMAC's.

    Attributes:
        n_turns: number of actions that turn the agent's view, between the moves and the attacks.
        own_place: observations include the agent's position on the map.
        direction: observations include the agent's view direction, and the state those of all agents.
        ally_types: observations include the allies' unit types; otherwise these entries are zero.
        padded_time: a feature that is always zero precedes the elapsed time (see `features.entity_layout`).
    """

    n_turns: int = 0
    own_place: bool = False
    direction: bool = False
    ally_types: bool = True
    padded_time: bool = True

    @property
    def n_normal_actions(self) -> int:
        """Number of actions without a target."""
        return N_NORMAL_ACTIONS + self.n_turns

    def n_actions(self, spec: MapSpec) -> int:
        """Return A: actions without target, then one per enemy, or per ally if medivacs heal and there are more."""
        heals = spec.map_type in HEALING
        return self.n_normal_actions + (max(spec.n_enemies, spec.n_agents) if heals else spec.n_enemies)


SMAC = Variant()


class _Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BattleArgs(_Args):
    """Arguments of all battle environments: SMAC's keys, `continuing_episode` and `reward_shield_fix`.

    Attributes:
        map_name: name of a SMAC map, or a set of maps (task_sets.md).
        continuing_episode: reaching the step limit truncates (the target bootstraps) instead of terminating.
        move_amount: length of a move order in cells.
        obs_all_health, obs_own_health: health (and shield) of all visible units, of the agent (implied by the former).
        obs_instead_of_state: the state is the concatenation of all observations.
        obs_last_action: observations include the last actions of visible allies.
        obs_pathing_grid, obs_terrain_height: the surrounding 8 pathing values, 9 heights.
        obs_timestep_number: elapsed share of the episode; adds two features (see `features.entity_layout`).
        state_last_action, state_timestep_number: the same for the state.
        reward_death_value: bonus for each enemy killed.
        reward_win, reward_defeat: added at the end of the episode.
        reward_negative_scale: weight of own losses if `reward_only_positive` is off.
        reward_only_positive: own losses do not count.
        reward_scale, reward_scale_rate: divide the reward by (largest possible return / rate).
        reward_sparse: only 1 for a win and -1 for a defeat (scaled, too).
        reward_shield_fix: regenerating enemy shields give no reward; off: a positive one, as in SMAC.
    """

    map_name: str = "3m"
    continuing_episode: bool = False
    move_amount: float = Field(default=2, gt=0)
    obs_all_health: bool = True
    obs_instead_of_state: bool = False
    obs_last_action: bool = False
    obs_own_health: bool = True
    obs_pathing_grid: bool = False
    obs_terrain_height: bool = False
    obs_timestep_number: bool = False
    reward_death_value: float = Field(default=10, ge=0)
    reward_defeat: float = 0
    reward_negative_scale: float = Field(default=0.5, ge=0)
    reward_only_positive: bool = True
    reward_scale: bool = True
    reward_scale_rate: float = Field(default=20, gt=0)
    reward_shield_fix: bool = False
    reward_sparse: bool = False
    reward_win: float = Field(default=200, ge=0)
    state_last_action: bool = True
    state_timestep_number: bool = False

    @property
    def variant(self) -> Variant:
        """Differences from SMAC; here none."""
        return SMAC


class SkirmishArgs(BattleArgs):
    """`env_args` of `env=skirmish`.

    Attributes:
        difficulty: SMAC's scale; here the scripted enemy's target range, from 6 cells at "1" to 9 from "7" on.
        sight_range: how far agents see, in cells; relative positions are divided by it. They attack and heal only what
            they see. The enemy's sight does not change.
        start: `formation` (both teams face each other), `mixed` (SMACv2's random starts: half of the battles mirrored,
            half surrounded) or `hidden` (the enemy 12 cells away, in any direction).
    """

    difficulty: str = Field(default="7", pattern="^[1-9A]$", coerce_numbers_to_str=True)
    sight_range: float = Field(default=SIGHT_RANGE, ge=2, le=45)
    start: Literal["formation", "mixed", "hidden"] = FORMATION

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, values: Any) -> Any:
        return named_fog(values) if isinstance(values, dict) else values

    @property
    def spec(self) -> MapSpec:
        """The map, with start and sight. Errors: UserError."""
        return spec_of(self.map_name, self.start, self.sight_range)


class SmacArgs(BattleArgs):
    """`env_args` of `env=sc2`: every key of the published `sc2.yaml`, and `reward_shield_fix`.

    Attributes:
        difficulty: strength of the game's built-in opponent, SMAC's scale.
        game_version: StarCraft II version; None or "latest": the newest installed.
        step_mul: game loops per agent step.
        seed: seed of the game; None: follows from the run's seed.
        heuristic_ai: SMAC's script plays instead of the agents; it orders attacks from any distance.
        heuristic_rest: the script walks until its target is within the agents' attack range.
        replay_dir: folder of replays, relative to the game's own; empty: the run's folder.
        replay_prefix: file name prefix of replays; empty: the map's name.
        debug: log observations, actions and rewards.
        game_timeout: seconds without an answer, or to start, after which the game counts as dead.
    """

    difficulty: str = Field(default="7", pattern="^[1-9A]$", coerce_numbers_to_str=True)
    game_version: str | None = None
    step_mul: int = Field(default=8, ge=1)
    seed: int | None = None
    heuristic_ai: bool = False
    heuristic_rest: bool = False
    replay_dir: str = ""
    replay_prefix: str = ""
    debug: bool = False
    game_timeout: float = Field(default=120, gt=0)


LIMIT = 200
RACES = {"10gen_terran": "T", "10gen_protoss": "P", "10gen_zerg": "Z"}
FIELD = "32x32_flat"  # the game's file of all these maps


class TeamArgs(_Args):
    """`capability_config.team_gen`: distribution of teams.

    Attributes:
        dist_type: each unit's type is drawn by its weight.
        unit_types, weights: the types and their probabilities.
        exception_unit_types: types that cannot make up a whole team.
        observe: observations include the allies' types.
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


class StartArgs(_Args):
    """`capability_config.start_positions`: distribution of start positions.

    Attributes:
        dist_type: `surrounded` (allies in the middle, up to four groups of enemies on the diagonals),
            `reflect_position` (allies anywhere in the left half, enemies mirrored), or a random choice of both.
        p: probability of `reflect_position` in the random choice.
        map_x, map_y: size of the map.
        n_enemies: PyMARL3's key; `capability_config.n_enemies` has precedence.
    """

    dist_type: Literal["surrounded", "reflect_position", "surrounded_and_reflect"] = "surrounded_and_reflect"
    p: float = Field(default=REFLECTED_SHARE, ge=0, le=1)
    map_x: int = Field(default=32, gt=2)
    map_y: int = Field(default=32, gt=2)
    n_enemies: int | None = Field(default=None, ge=1)


class CapabilityArgs(_Args):
    """`capability_config`: distributions from which each battle is drawn.

    Attributes:
        n_units, n_enemies: numbers of allies and enemies; null: as many enemies as allies.
        team_gen, start_positions: teams and positions; without `start_positions` each side starts at one point.
    """

    n_units: int = Field(default=5, ge=1)
    n_enemies: int | None = Field(default=None, ge=1)
    team_gen: TeamArgs = TeamArgs(
        unit_types=("marine", "marauder", "medivac"), weights=(0.45, 0.45, 0.1), exception_unit_types=("medivac",)
    )
    start_positions: StartArgs | None = StartArgs()

    @property
    def enemies(self) -> int:
        """Number of enemies."""
        beside = self.start_positions.n_enemies if self.start_positions is not None else None
        return self.n_enemies or beside or self.n_units


class SmacV2Args(SmacArgs):
    """`env_args` of `env=sc2_v2`.

    Attributes:
        map_name: `10gen_terran`, `10gen_protoss` or `10gen_zerg`; all use the game's map `32x32_flat`.
        capability_config: distributions of teams and start positions.
        conic_fov: agents see and attack only units in the sector that they look at.
        num_fov_actions: number of sectors; with `conic_fov`, one action per sector turns the view there.
        change_fov_with_move: PyMARL3's key: four sectors, and a move turns the view instead of separate actions.
        obs_own_pos: observations include the agent's position on the map.
        obs_starcraft: only True is supported.
        use_unit_ranges: sight and attack range by unit type; False: 9 and 6 for all, as in SMAC.
        min_attack_range: smallest attack range with `use_unit_ranges`.
        prob_obs_enemy: probability that an agent learns of an enemy that another one found (see `obs_order_fix`).
        action_mask: attacks out of range are not available; False: they are available and have no effect.
        fully_observable: observations include all units, whatever the range and sector.
        kill_unit_step_mul: no effect; accepted because the published files have it.
        obs_order_fix: an agent sees every enemy in its sight. False, as SMACv2: agents observe in a random order that
            follows from the episode's seed, and an enemy found by a later agent hides itself and all enemies before it
            from earlier agents.
        reward_scale_fix: each battle's own enemies scale its rewards. False, as SMACv2: those of the environment's
            first battle.
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
        """Number of view directions; 0 without a limited field of view."""
        return (4 if self.change_fov_with_move else self.num_fov_actions) if self.conic_fov else 0

    @property
    def variant(self) -> Variant:
        """Differences from SMAC that follow from these keys."""
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
        raise unknown_name("env_args.map_name", name, RACES)
    kind = f"{name.removeprefix('10gen_')}_gen"
    for unit in config.team_gen.unit_types:
        if unit not in TYPE_ORDER[kind]:
            known = " ".join(TYPE_ORDER[kind])
            raise UserError(f"env_args.capability_config.team_gen.unit_types: {unit} is not of {name} ({known})")
    units, race = TYPE_ORDER[kind][:1], RACES[name]
    return MapSpec(name, units * config.n_units, units * config.enemies, LIMIT, race, race, 3, kind, file=FIELD)
