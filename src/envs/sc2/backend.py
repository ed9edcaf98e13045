"""`BattleBackend` with the real game: one game process, one battle at a time.

As in SMAC (`reset`, `restart`, `init_units`, `update_units`): allies are the first player's units sorted by (type, x,
y), enemies the second player's in the game's order. A unit that the game no longer lists is dead and keeps its last
values except health; one listed with health 0 is dead, too, but its side is not gone yet. A new battle begins when all
units are killed and a trigger of the map brings them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omagd.envs.battle.args import SmacArgs
from omagd.envs.battle.backend import Order, Terrain, Units
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.units import UNIT_ID
from omagd.envs.sc2.client import debug_pb, sc_pb
from omagd.envs.sc2.game import ATTEMPTS, Game, GameLost
from omagd.envs.sc2.install import GAME_TYPES, read_terrain
from omagd.utils.errors import UserError

ALLY, ENEMY = 1, 2  # owners
ABILITY = {int(Order.STOP): 4, int(Order.MOVE): 16, int(Order.ATTACK): 23, int(Order.HEAL): 386}
LOOPS_AFTER_KILL = 2
PATIENCE = 400  # game loops to wait for all units of a new battle

_NONE, _STOP, _MOVE = int(Order.NONE), int(Order.STOP), int(Order.MOVE)

# Fields of `Units` that are read after every step.
_FLOATS = ("x", "y", "health", "shield", "energy", "cooldown")


class UnitsMissing(GameLost):
    """Some units of a battle did not appear."""


class GameBackend:
    """`BattleBackend` with one game, which is started by the first `reset` and by the next one after it was lost.

    Attributes:
        terrain: set by the first `reset`. restarts: number of restarts after a loss.
        build: build number reported by the game; 0 before the first start. seed: of the running game.
        lost: exception of `advance` and `save_replay` if the game has died.
    """

    n_slots = 1
    lost = GameLost
    terrain: Terrain

    def __init__(self, spec: MapSpec, args: SmacArgs) -> None:
        self._spec, self._args, self._n, self._total = spec, args, spec.n_agents, spec.n_agents + spec.n_enemies
        self.game: Game | None = None
        self.restarts = self._starts = self.build = 0
        self.seed: int | None = None
        self._values = np.zeros((len(_FLOATS), 1, self._total), np.float32)
        self._max = np.zeros((2, 1, self._total), np.float32)
        self._column: dict[int, int] = {}
        self._tags: list[int] = []
        self._ally_ids: dict[int, int] = {}
        self.units = Units(
            **dict(zip(_FLOATS, self._values, strict=True)),
            health_max=self._max[0],
            shield_max=self._max[1],
            type_id=np.full((1, self._total), -1, np.int16),
            alive=np.zeros((1, self._total), bool),
            listed=np.zeros((1, self._total), bool),
        )
        step = sc_pb.Request(step=sc_pb.RequestStep(count=args.step_mul))
        look = sc_pb.Request(observation=sc_pb.RequestObservation())
        self._step, self._look = step.SerializeToString(), look.SerializeToString()

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start a new battle; `seeds` only matter for a newly started game.

        Errors: UserError if the game does not start, or dies repeatedly before the battle begins.
        """
        if not which[0]:
            return
        for _ in range(ATTEMPTS):
            try:
                self._begin(int(seeds[0]))
                return
            except GameLost as error:
                self.lose(error)
                reason = error
        raise UserError(f"StarCraft II was lost {ATTEMPTS} times while a battle on {self._spec.name} began: {reason}")

    def _begin(self, seed: int) -> None:
        """Start the game or respawn its units. Errors: GameLost."""
        if self.game is None:
            self._launch(seed)
        else:  # the map's trigger brings the units back
            self._kill([self._tags[column] for column in np.flatnonzero(self.units.alive[0])])
        self._enlist()

    def _launch(self, seed: int) -> None:
        own = self._args.seed
        chosen = seed if own is None or self._starts else own
        self.seed = chosen & 0x7FFFFFFF
        self.game = Game(self._spec, self._args, self.seed)
        self.restarts += self._starts > 0
        self._starts += 1
        try:
            self.build = int(self.game.version.rpartition(".")[2])
            self.terrain = read_terrain(self.game.facts)
        except ValueError as error:
            raise GameLost(f"its version or map data is invalid: {error}") from None

    def _kill(self, tags: list[int]) -> None:
        command = debug_pb.DebugCommand(kill_unit=debug_pb.DebugKillUnit(tag=tags))
        self._game.ask(debug=sc_pb.RequestDebug(debug=[command]))
        self._game.ask(step=sc_pb.RequestStep(count=LOOPS_AFTER_KILL))

    def _enlist(self) -> None:
        """Wait for all units and assign them to columns. Errors: UnitsMissing, GameLost."""
        for _ in range(PATIENCE):
            listed = self._listed(self._game.exchange(self._look))
            allies = [unit for unit in listed if unit.owner == ALLY]
            enemies = [unit for unit in listed if unit.owner == ENEMY]
            if (len(allies), len(enemies)) == (self._n, self._total - self._n):
                allies.sort(key=lambda unit: (unit.unit_type, unit.pos.x, unit.pos.y))
                self._assign(allies, enemies)
                return
            self._game.ask(step=sc_pb.RequestStep(count=1))
        found = f"{len(allies)} of {self._n} allies and {len(enemies)} of {self._total - self._n} enemies"
        raise UnitsMissing(f"only {found} were there after {PATIENCE} game loops")

    def _assign(self, allies: Sequence[Any], enemies: Sequence[Any]) -> None:
        everyone = [*allies, *enemies]
        if not self._ally_ids:
            first = allies[0].unit_type
            self._ally_ids = {first + i: UNIT_ID[name] for i, name in enumerate(self._spec.ally_types)}
        kinds = [self._ally_ids.get(unit.unit_type, -1) for unit in allies]
        kinds += [UNIT_ID[name] if (name := GAME_TYPES.get(unit.unit_type)) else -1 for unit in enemies]
        self.units.type_id[0] = kinds
        self._tags = [unit.tag for unit in everyone]
        self._column = {tag: column for column, tag in enumerate(self._tags)}
        self._max[0, 0] = [unit.health_max for unit in everyone]
        self._max[1, 0] = [unit.shield_max for unit in everyone]
        self._read(everyone)

    def advance(self, order: np.ndarray, target: np.ndarray, dest: np.ndarray, active: np.ndarray) -> None:
        """Give orders to the allies and play one agent step. Errors: GameLost; the units stay as they were."""
        if not active[0]:
            return
        actions = self._commands(order[0].tolist(), target[0].tolist(), dest[0].tolist())
        self._read(self._listed(self._game.exchange(actions, self._step, self._look)))

    def _commands(self, orders: list[int], targets: list[int], dests: list[list[float]]) -> bytes:
        """Return the serialized request with the commands of all agents that act."""
        request = sc_pb.Request(action=sc_pb.RequestAction())
        for agent, order in enumerate(orders):
            if order == _NONE:
                continue
            command = request.action.actions.add().action_raw.unit_command
            command.ability_id = ABILITY[order]
            command.unit_tags.append(self._tags[agent])
            command.queue_command = False
            if order == _MOVE:
                command.target_world_space_pos.x, command.target_world_space_pos.y = dests[agent]
            elif order != _STOP:
                command.target_unit_tag = self._tags[targets[agent]]
        return bytes(request.SerializeToString())

    def _listed(self, response: Any) -> Any:
        """Return the units in the Response to an observation request. Errors: GameLost if the match is over."""
        if not self._game.in_game:
            raise GameLost("the game has ended the match")
        if not response.HasField("observation"):
            raise GameLost("its answer holds no observation")
        return response.observation.observation.raw_data.units

    def _read(self, listed: Any) -> None:
        """Copy the game's values of each unit into `units`."""
        units = self.units
        units.listed[:] = False
        for unit in listed:
            column = self._column.get(unit.tag)
            if column is not None:
                place = unit.pos.x, unit.pos.y
                self._values[:, 0, column] = *place, unit.health, unit.shield, unit.energy, unit.weapon_cooldown
                units.listed[0, column] = True
        units.health[~units.listed] = 0.0
        np.greater(units.health, 0.0, out=units.alive)

    @property
    def _game(self) -> Game:
        if self.game is None:
            raise GameLost("there is no game")
        return self.game

    def lose(self, error: GameLost) -> None:
        """Close a game that was lost; the next `reset` starts a new one."""
        game, self.game = self.game, None
        if game is not None:
            game.log_death(error)

    def targets(self, slot: int) -> np.ndarray:
        """Return [U] -1: the game does not tell whom units attack."""
        return np.full(self._total, -1)

    def save_replay(self, folder: str) -> Path:
        """Write the replay of all battles since the game was started; return the file. Errors: GameLost, OSError."""
        # The process id keeps games that save in the same second apart.
        prefix = f"{self._args.replay_prefix or self._spec.name}_{self._game.pid}"
        return self._game.save_replay(folder, prefix)

    def close(self) -> None:
        """End the game. May be called twice."""
        game, self.game = self.game, None
        if game is not None:
            game.close()
