"""Typed `env_args` of the battle environments: SMAC's published keys with SMAC's defaults."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class BattleArgs(BaseModel):
    """What the semantics of a battle depend on, whichever back-end plays it.

    Attributes:
        map_name: name of a SMAC map.
        continuing_episode: reaching the step limit truncates (the target bootstraps) instead of terminating.
        move_amount: length of a move order in cells.
        obs_all_health, obs_own_health: health (and shield) of all visible units, of oneself (implied by the former).
        obs_instead_of_state: the state is the observations of all agents, one after another.
        obs_last_action: allies' blocks show their last action.
        obs_pathing_grid, obs_terrain_height: the surrounding 8 pathing values, 9 heights.
        obs_timestep_number: elapsed share of the episode; adds two features (see `features.entity_layout`).
        state_last_action, state_timestep_number: the same for the state.
        reward_death_value: bonus for each enemy killed.
        reward_win, reward_defeat: added at the end of the episode.
        reward_negative_scale: weight of own losses where `reward_only_positive` is off.
        reward_only_positive: own losses do not count.
        reward_scale, reward_scale_rate: divide the reward by (largest possible return / rate).
        reward_sparse: only 1 for a win and -1 for a defeat (scaled likewise).
        reward_shield_fix: enemy shields that regenerate give no reward; off, they give a positive one as in SMAC.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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


class SkirmishArgs(BattleArgs):
    """`env_args` of `env=skirmish`.

    Attributes:
        difficulty: SMAC's scale; here how far the scripted enemy looks for targets, 6 cells at "1" to 9 from "7" on.
    """

    difficulty: str = Field(default="7", pattern="^[1-9A]$", coerce_numbers_to_str=True)


class SmacArgs(BattleArgs):
    """`env_args` of `env=sc2`: every key of the published `sc2.yaml`, and `reward_shield_fix`.

    Attributes:
        difficulty: the game's built-in opponent, SMAC's scale.
        game_version: StarCraft II version; None or "latest" for the newest installed.
        step_mul: game loops for one agent step.
        seed: seed of the game; None lets the run's seed decide.
        heuristic_ai: SMAC's script plays instead of the agents; it orders attacks from any distance.
        heuristic_rest: the script walks until its target is in reach of the agents' attack actions.
        replay_dir: where replays go; empty for the run's folder, relative to the game's own folder of replays.
        replay_prefix: how they are named; empty for the map's name.
        debug: log observations, actions and rewards.
        game_timeout: seconds that the game may take to start, and for each answer, until it counts as dead.
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
