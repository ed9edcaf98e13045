"""The stand-in's battles: the skirmish simulator with the game's units, orders and respawning."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omagd.envs.battle.backend import Order, Terrain
from omagd.envs.battle.maps import MAPS, TYPE_ORDER, MapSpec, build_terrain
from omagd.envs.battle.units import UNIT_ID, UNITS
from omagd.envs.sc2.client import raw_pb
from omagd.envs.sc2.install import GAME_TYPES
from sc2_stand_in import FIRST_ALLY_TYPE, N_UNIT_TYPES, battle_seed
from sc2_stand_in.tape import Tape, TapeWriter, order_digest

if TYPE_CHECKING:
    from battle_toys import Simulator

LOOPS_PER_STEP = 8
TYPE_IDS = {name: number for number, name in GAME_TYPES.items()}
V2_ALLIES = ("baneling", "colossus", "hydralisk", "marauder", "marine", "medivac", "stalker", "zealot", "zergling")
V2_TYPE_IDS = {name: N_UNIT_TYPES - len(V2_ALLIES) + i for i, name in enumerate(V2_ALLIES)}
STOP, MOVE, ATTACK, HEAL = 4, 16, 23, 386  # ability ids
SUCCESS, NOT_SUPPORTED, CANT_FIND_UNIT = 1, 2, 39  # action results
CROWD = 0.7  # units created at one point come to lie about this far from each other


def roughened(terrain: Terrain, seed: int) -> Terrain:
    """Return a field of the same size with a hole in one cell of eight, and every cell at another height."""
    rng = np.random.default_rng(seed)
    solid = rng.random(terrain.pathing.shape) > 1 / 8
    height = (rng.integers(0, 256, terrain.height.shape) / 255).astype(np.float32)
    return replace(terrain, pathing=terrain.pathing & solid, height=height)


class World:
    """One game on one map.

    Args:
        map_name: name of the map file. seed: random seed of the game. difficulty: SMAC's scale.
        settings: the variables RECORD, TAPE, ROUGH and LINGER.
    """

    def __init__(self, map_name: str, seed: int, difficulty: str, settings: dict[str, str]) -> None:
        self._spec = MAPS.get(map_name)
        self._seed, self._difficulty = seed, difficulty
        self._tape, self._lingers = settings.get("TAPE"), "LINGER" in settings
        self.loop = self.battles = self.steps_of_battle = 0
        self._owed = self._spawned = self._turned = self._dead_commands = 0
        self._kill: set[int] = set()
        self._create: list[tuple[str, int, float, float]] = []
        self._simulator: Simulator | Tape | None = None
        self._column: dict[int, int] = {}
        self.terrain = self._simulate(self._spec).terrain if self._spec else build_terrain(MAPS["3m"])
        if "ROUGH" in settings:
            self.terrain = roughened(self.terrain, seed)
        self.writer = TapeWriter(self.terrain) if "RECORD" in settings else None
        if self._spec is not None:
            self._respawn()

    def _simulate(self, spec: MapSpec) -> Simulator | Tape:
        """Make `spec` the battle that is played and return what plays it."""
        if self._tape is None:
            from battle_toys import Simulator  # slow: imports Numba, which a tape does not need

            self._simulator = Simulator(spec, 1, difficulty=self._difficulty)
        else:
            if self._simulator is None:
                self._simulator = Tape(Path(self._tape), spec.n_agents)
            self._simulator.units.type_id[0] = spec.unit_ids()
        self._n = spec.n_agents
        self._active = np.ones(1, bool)
        self._order = np.zeros((1, self._n), np.int64)
        self._target = np.zeros((1, self._n), np.int64)
        self._dest = np.zeros((1, self._n, 2), np.float32)
        return self._simulator

    def _respawn(self) -> None:
        self._simulator.reset(self._active, np.array([battle_seed(self._seed, self.battles)]))
        first = TYPE_ORDER[self._spec.map_type]
        types = [FIRST_ALLY_TYPE + first.index(name) for name in self._spec.allies]
        self._begin(types, [TYPE_IDS[name] for name in self._spec.enemies])

    def _begin(self, ally_types: list[int], enemy_types: list[int]) -> None:
        """Give tags and cards to the units of a new battle."""
        units, n = self._simulator.units, self._n
        rng = np.random.default_rng(self.battles)
        numbers = self._spawned + rng.permutation(units.x.shape[1])
        self._spawned += units.x.shape[1]
        self._cards, self._column = [], {}
        for column, kind in enumerate((*ally_types, *enemy_types)):
            card = raw_pb.Unit(
                display_type=1, alliance=1 if column < n else 4, owner=1 if column < n else 2, unit_type=kind,
                tag=(1 << 32) + 1 + (int(numbers[column]) << 18), build_progress=1.0, radius=0.5,
                health_max=float(units.health_max[0, column]), shield_max=float(units.shield_max[0, column]),
                energy_max=UNITS[units.type_id[0, column]].energy_max,
            )  # fmt: skip
            card.pos.z = 10.0
            self._cards.append((card, card.pos))
            self._column[card.tag] = column
        allies = rng.permutation(n).tolist()
        enemies = list(range(n, len(self._cards)))
        self._listing = [c for pair in zip(enemies, allies, strict=False) for c in pair]
        self._listing += enemies[len(allies) :] + allies[len(enemies) :]
        self.battles += 1
        self._listed = units.alive[0].copy()
        self._owed = self._turned = self.steps_of_battle = 0
        if self.writer is not None:
            self.writer.begin(units)

    def order(self, command: Any) -> int:
        """Take an `ActionRawUnitCommand` for units of player 1 and return the action's result."""
        kind = {STOP: Order.STOP, MOVE: Order.MOVE, ATTACK: Order.ATTACK, HEAL: Order.HEAL}.get(command.ability_id)
        aim = self._column.get(command.target_unit_tag) if kind in (Order.ATTACK, Order.HEAL) else 0
        if kind is None or (kind == Order.MOVE and not command.HasField("target_world_space_pos")):
            return NOT_SUPPORTED
        for tag in command.unit_tags:
            column = self._column.get(tag)
            if column is None or column >= self._n or aim is None:
                return CANT_FIND_UNIT
            if not self._simulator.units.alive[0, column]:
                self._dead_commands = zlib.crc32(command.SerializeToString(deterministic=True), self._dead_commands)
            self._order[0, column], self._target[0, column] = kind, aim
            if kind == Order.MOVE:
                point = command.target_world_space_pos
                self._dest[0, column] = point.x, point.y
        return SUCCESS

    def kill(self, tags: list[int]) -> None:
        """Let these units die at the next step."""
        self._kill.update(self._column[tag] for tag in tags if tag in self._column)

    def create(self, command: Any) -> None:
        """Let the units of a `DebugCreateUnit` appear at the next step. Errors: ValueError."""
        ids = V2_TYPE_IDS if command.owner == 1 else TYPE_IDS
        names = [name for name, number in ids.items() if number == command.unit_type]
        if self._spec is not None or not names or self._anybody():
            raise ValueError(f"cannot create unit type {command.unit_type} for {command.owner} here and now")
        for _ in range(command.quantity or 1):
            self._create.append((names[0], command.owner, command.pos.x, command.pos.y))

    def step(self, loops: int) -> None:
        """Play so many game loops."""
        self.loop += loops
        self._execute_kills()
        if self._create:
            self._found()
            return
        if not self._anybody():
            if self._spec is not None:
                self._respawn()
            return
        self.steps_of_battle += 1
        self._owed += loops
        while self._owed >= LOOPS_PER_STEP:
            self._owed -= LOOPS_PER_STEP
            alive = self._simulator.units.alive[0].copy()
            self._simulator.advance(self._order, self._target, self._dest, self._active)
            self._listed = self._simulator.units.alive[0] | (alive & self._lingers)
            if self.writer is not None:
                digest = order_digest(self._order[0], self._target[0], self._dest[0], alive[: self._n])
                self.writer.played(digest, self._dead_commands, self._simulator.units)
            self._order[:] = Order.NONE
            self._dead_commands = 0
            self._turned += 1

    def _anybody(self) -> bool:
        return self._simulator is not None and bool(self._listed.any())

    def _execute_kills(self) -> None:
        if not self._kill:
            return
        self._simulator.kill(sorted(self._kill))
        self._kill.clear()
        self._listed = self._simulator.units.alive[0].copy()  # who is killed by a command does not linger

    def _found(self) -> None:
        """Start the battle of all created units; allies in the order of their types, as the map table has them."""
        allies = sorted((c for c in self._create if c[1] == 1), key=lambda c: V2_TYPE_IDS[c[0]])
        enemies = [c for c in self._create if c[1] == 2]
        self._create = []
        centre = tuple(float(np.mean([c[axis] for c in allies])) for axis in (2, 3))
        race = {UNITS[UNIT_ID[c[0]]].race for c in allies}.pop()
        names = tuple(c[0] for c in allies), tuple(c[0] for c in enemies)
        spec = MapSpec("created", *names, 1, race, race, 0, "marines", ally_start=(centre,))
        simulator = self._simulate(spec)
        simulator.reset(self._active, np.array([battle_seed(self._seed, self.battles)]))
        if not isinstance(simulator, Tape):
            simulator.place(*self._spread(np.array([c[2:] for c in (*allies, *enemies)])))
        self._begin([V2_TYPE_IDS[name] for name in names[0]], [TYPE_IDS[name] for name in names[1]])

    def _spread(self, points: np.ndarray) -> np.ndarray:
        """Return [2, U] places on the field near `points` [U, 2]; units at one point come to lie on a spiral."""
        x0, y0, x1, y1 = self.terrain.playable
        before = np.array([(points[:i] == points[i]).all(axis=1).sum() for i in range(len(points))])
        angle, radius = before * 2.399963, CROWD * np.sqrt(before)
        x = np.clip(points[:, 0] + radius * np.cos(angle), x0 + 0.5, x1 - 0.5)
        y = np.clip(points[:, 1] + radius * np.sin(angle), y0 + 0.5, y1 - 0.5)
        return np.stack([x, y])

    def show(self, listed: Any, hide_enemies: bool = False) -> None:
        """Append all living units, and the dead that linger, to the repeated field `listed`."""
        if self._simulator is None:
            return
        units = self._simulator.units
        there, x, y = self._listed.tolist(), units.x[0].tolist(), units.y[0].tolist()
        health, shield = units.health[0].tolist(), units.shield[0].tolist()
        energy, cooldown = units.energy[0].tolist(), units.cooldown[0].tolist()
        turn = self._turned % len(self._listing)
        for column in self._listing[turn:] + self._listing[:turn]:
            if there[column] and not (hide_enemies and column >= self._n):
                card, pos = self._cards[column]
                pos.x, pos.y = x[column], y[column]
                card.health, card.shield = max(health[column], 0.0), shield[column]
                card.energy, card.weapon_cooldown = energy[column], cooldown[column]
                listed.append(card)
