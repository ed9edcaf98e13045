"""The environments `sc2` and `sc2_v2`: battles of SMAC and SMACv2 in StarCraft II, each in its own game process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import BaseModel

from omagd.envs.battle.args import SmacArgs, SmacV2Args, v2_map
from omagd.envs.battle.features import battle_info
from omagd.envs.battle.heuristic import Heuristic
from omagd.envs.battle.interface import SmacInterface, SmacV2Interface
from omagd.envs.battle.maps import MapSpec, get_game_map
from omagd.envs.battle.semantics import BattleEnv, BattleSemantics
from omagd.envs.battle.v2_semantics import V2Semantics
from omagd.envs.frames import Frame, without_place
from omagd.envs.protocol import StepResult
from omagd.envs.sc2.install import build_of, game_folder, map_data
from omagd.utils.errors import UserError

if TYPE_CHECKING:
    from omagd.envs.sc2.backend import GameBackend

LOG = logging.getLogger("omagd.sc2")


class SC2Battle(BattleEnv):
    """One slot: SMAC's semantics with the real game. The game starts with the first `reset`.

    Errors: UserError when the game, its version or the map is missing; ValueError for more slots.
    """

    args_model: ClassVar[type[BaseModel]] = SmacArgs
    args: SmacArgs
    name: ClassVar[str] = "sc2"
    deterministic: ClassVar[bool] = False  # a restarted game plays different battles

    def __init__(self, args: SmacArgs, n_slots: int = 1) -> None:
        if n_slots != 1:
            raise ValueError(f"one game plays one battle at a time, not {n_slots}")
        spec = self._map_of(args)
        build_of(args.game_version)
        map_data(game_folder(), spec.game_file)  # raises if it is missing
        self.n_slots, self.spec, self.args = n_slots, spec, args
        self.info = battle_info(self.name, spec, args)
        self._backend: GameBackend | None = None
        self._semantics: BattleSemantics | None = None
        script = Heuristic(spec.n_agents, args, args.variant.n_normal_actions)
        self._heuristic = script if args.heuristic_ai else None
        self._lost = 0

    @staticmethod
    def _map_of(args: Any) -> MapSpec:
        """Return the map. Errors: UserError for an unknown map."""
        return get_game_map(args.map_name)

    def _new_backend(self) -> GameBackend:
        from omagd.envs.sc2.backend import GameBackend  # slow: imports pysc2

        return GameBackend(self.spec, self.args)

    def _new_semantics(self, backend: GameBackend) -> BattleSemantics:
        return BattleSemantics(self.spec, self.args, backend)

    def rules(self) -> BattleSemantics:
        """Return the semantics of the battle. Errors: ValueError before the first `reset`."""
        return self._started()[0]

    def seed(self) -> int | None:
        """Return the seed of the running game; before it starts, `env_args.seed`."""
        seed = None if self._backend is None else self._backend.seed
        return self.args.seed if seed is None else seed

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start a new battle. The seed only matters if this starts the game: it seeds all of the game's battles.

        Errors: UserError when the game does not start.
        """
        if self._backend is None:
            self._backend = self._new_backend()
        self._backend.reset(which, seeds)
        if self._semantics is None:
            self._semantics = self._new_semantics(self._backend)
        self._semantics.begin(which, seeds)
        if self._heuristic is not None:
            self._heuristic.begin()

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` [1, n]. If the game dies, the result is `lost`, and the next `reset` starts a new game.

        Errors: ValueError for an action that is not available.
        """
        semantics, backend = self._started()
        orders = semantics.orders(actions, active)
        if self._heuristic is not None:
            orders = self._heuristic.orders(backend.units, backend.terrain, semantics.avail_actions())
        try:
            backend.advance(*orders, active)
        except backend.lost as error:
            backend.lose(error)
            semantics.drop(active)
            self._lost += 1
            return StepResult(np.zeros(1, np.float32), active.copy(), np.zeros(1, bool), {}, lost=active.copy())
        return semantics.finish_step(active)

    def played(self) -> np.ndarray:
        """Return [n], the actions of SMAC's script in the last step (`heuristic_ai`)."""
        assert self._heuristic is not None
        return self._heuristic.actions

    def frame(self, slot: int) -> Frame:
        """Return the units; before the first `reset`, only the agents' names."""
        return without_place(self.info.n_agents) if self._semantics is None else super().frame(slot)

    def _started(self) -> tuple[BattleSemantics, GameBackend]:
        if self._semantics is None or self._backend is None:
            raise ValueError(f"env={self.name}: reset comes first")
        return self._semantics, self._backend

    def get_stats(self) -> dict[str, float]:
        """Return SMAC's counters since construction, restarts of the game, lost episodes, and the game's build."""
        counted = {} if self._semantics is None else self._semantics.stats()
        restarts, build = (0, 0) if self._backend is None else (self._backend.restarts, self._backend.build)
        return {**counted, "restarts": restarts, "lost_episodes": self._lost, "game_build": build}

    def save_replay(self, folder: str) -> None:
        """Write the game's replay of all battles since its start into `replay_dir`, else `folder`, else its own folder.

        A game that has died has no replay: logs a warning. Errors: UserError if the folder is not writable.
        """
        backend = self._started()[1]
        where = self.args.replay_dir or (folder and str(Path(folder).resolve()))
        try:
            LOG.info("replay: %s", backend.save_replay(where))
        except backend.lost as error:
            LOG.warning("no replay was written: %s", error)
        except (OSError, ValueError) as error:
            raise UserError(f"env_args.replay_dir={where}: no replay was written: {error}") from None

    def close(self) -> None:
        """End the game. May be called twice."""
        if self._backend is not None:
            self._backend.close()


class SC2Env(SmacInterface):
    """`SC2Battle` with SMAC's methods. The thread of the first `reset` must outlive the game."""

    args_model: ClassVar[type[BaseModel]] = SmacArgs
    battle: ClassVar[type[SC2Battle]] = SC2Battle
    env: SC2Battle

    def __init__(self, args: SmacArgs) -> None:
        super().__init__(self.battle(args))
        self._scripted, self._debug = args.heuristic_ai, args.debug
        if args.debug:
            _log_to_stderr()

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        """Play [n] actions; with `heuristic_ai`, overwrite `actions` with those of the script."""
        reward, terminated, info = super().step(actions)
        if self._scripted:
            actions[:] = self.env.played()
        if self._debug:
            LOG.debug("actions %s reward %s terminated %s %s", list(actions), reward, terminated, info)
            LOG.debug("observations\n%s\nstate\n%s", self.get_obs(), self.get_state())
        return reward, terminated, info


def _log_to_stderr() -> None:
    """Write debug messages to stderr, since a worker process has no other log."""
    LOG.setLevel(logging.DEBUG)
    if not LOG.handlers:
        LOG.addHandler(logging.StreamHandler())


class SC2V2Battle(SC2Battle):
    """One slot: SMACv2's semantics with the real game. Teams, positions and visibility follow from the reset seeds."""

    args_model: ClassVar[type[BaseModel]] = SmacV2Args
    name: ClassVar[str] = "sc2_v2"
    args: SmacV2Args

    @staticmethod
    def _map_of(args: SmacV2Args) -> MapSpec:
        return v2_map(args)

    def _new_backend(self) -> GameBackend:
        from omagd.envs.sc2.v2_backend import V2Backend  # slow: imports pysc2

        return V2Backend(self.spec, self.args)

    def _new_semantics(self, backend: GameBackend) -> BattleSemantics:
        return V2Semantics(self.spec, self.args, backend)


class SC2V2Env(SmacV2Interface, SC2Env):
    """`SC2V2Battle` with SMACv2's methods. The thread of the first `reset` must outlive the game."""

    args_model: ClassVar[type[BaseModel]] = SmacV2Args
    battle: ClassVar[type[SC2Battle]] = SC2V2Battle
