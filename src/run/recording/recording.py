"""Recordings of episodes: the format, and its file (`*.json.gz`), which `watch FILE` opens.

Letters: n agents, U units (the agents first), A actions, T steps.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omagd.envs.frames import AGENTS, OPPONENTS, THINGS, Scene
from omagd.run.recording import WRITERS
from omagd.utils.errors import UserError
from omagd.utils.storage import replace_file

SUFFIX = ".json.gz"
LARGEST = 1 << 28
"""Largest content of a file, in bytes after decompression."""

TEAMS, SEEN = (AGENTS, OPPONENTS, THINGS), re.compile("[0-9a-f]*")

FARTHEST, MOST_UNITS, LONGEST_TEXT = 10_000.0, 4096, 10_000
"""Largest distance from the origin in cells, units of a scene, and characters of a name: limits of what is drawn."""

FIX = f"give a run's folder, or a *{SUFFIX} from its replays/"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""What a model computed; a diverged one computes values that JSON has no numbers for."""

Belief = tuple[int, Number, Number, Number | None]
"""What an agent takes an unseen unit to be: number of the unit, position in cells, share of health (None: unknown)."""


class Moment(_Part):
    """One moment. The lists [U] are those of `omagd.envs.frames.Frame`.

    Attributes:
        actions: [n], chosen at this moment; empty at the last one. values: [n][A], of each action as `Episode.values`
            says, None where it is not available; empty where unknown.
        seen: [n], the units that each agent sees, as a hexadecimal number whose bit u stands for unit u; empty where
            observations have no units. beliefs: [n], of the units that it does not see; empty without reconstruction.
    """

    x: list[float]
    y: list[float]
    alive: list[bool]
    health: list[float] = []
    shield: list[float] = []
    targets: list[int] = []
    bodies: list[list[float]] = []
    marked: list[int] = []
    score: list[float] = []
    actions: list[int] = []
    values: list[list[Number | None]] = []
    seen: list[str] = []
    beliefs: list[list[Belief]] = []


def number_of(value: float) -> Number:
    """Return a value as a recording holds it."""
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def is_drawable(belief: Belief) -> bool:
    """Return whether all of a belief are numbers."""
    return not any(isinstance(part, str) for part in belief)


def _near(*values: float) -> bool:
    """Return whether all values are distances that can be drawn (NaN is none)."""
    return all(-FARTHEST <= value <= FARTHEST for value in values)


def _box(x0: float, y0: float, x1: float, y1: float, least: float) -> bool:
    """Return whether this is a rectangle whose sides have at least this length."""
    return _near(x0, y0, x1, y1) and x1 - x0 >= least and y1 - y0 >= least


def _faults_of_scene(scene: Scene) -> Iterator[str]:
    units, n = len(scene.ids), scene.teams.count(AGENTS)
    if not 0 < n <= units <= MOST_UNITS or not len(scene.teams) == len(scene.kinds) == units:
        yield "the scene's units differ in number"
    if len(set(scene.ids)) != units:
        yield "two units have one name"
    names = len(scene.team_names)
    if any(scene.teams[:n]) or not {*scene.teams} <= {*TEAMS[:names]} or (scene.score and names < 2):
        yield "a unit has no team, or agents are not first"
    if any(len(part) not in (0, units) for part in (scene.health_max, scene.shield_max, scene.heals)):
        yield "health or healers are of other units"
    if not all(0 <= most < math.inf for most in (*scene.health_max, *scene.shield_max)):
        yield "a largest health is no number from 0 on"
    if any(
        len(part) not in (0, n) or not _near(*part) or min(part, default=0) < 0 for part in (scene.sight, scene.reach)
    ):
        yield "a sight or reach is no distance of an agent"
    if not _box(*scene.bounds, least=1) if scene.bounds else scene.torus:
        yield "the map has no size"
    if not all(_box(*wall, least=0) for wall in scene.walls):
        yield "a wall is no rectangle"


def _faults_of_moment(scene: Scene, moment: Moment) -> Iterator[str]:
    units, n = len(scene.ids), scene.teams.count(AGENTS)
    whole = (moment.health, moment.shield, moment.targets, moment.bodies)
    if {len(moment.x), len(moment.y), len(moment.alive), *(len(part) for part in whole if part)} != {units}:
        yield "a moment has other units than the scene"
    if any(part and len(part) != n for part in (moment.actions, moment.values, moment.seen, moment.beliefs)):
        yield "a moment has other agents than the scene"
    if (any(scene.health_max) and not moment.health) or (any(scene.shield_max) and not moment.shield):
        yield "a moment has no health"
    if not _near(*moment.x, *moment.y) or any(len(body) % 2 or not _near(*body) for body in moment.bodies):
        yield "a unit is at no place"
    if any(moment.bodies) and scene.bounds is None:
        yield "a body needs a map"
    if not all(0 <= unit < units and moment.alive[unit] for unit in moment.marked):
        yield "a unit is marked that is not there"
    if len(moment.score) != (2 if scene.score else 0):
        yield "the score is not that of two teams"
    if any(action < 0 for action in moment.actions) or not all(map(SEEN.fullmatch, moment.seen)):
        yield "an action is negative, or what is seen is no hexadecimal number"
    places = [
        (unit, [v for v in (x, y) if not isinstance(v, str)]) for each in moment.beliefs for unit, x, y, _ in each
    ]
    if not all(0 <= unit < units and _near(*place) for unit, place in places):
        yield "a belief is about no unit or place"


def _shows_a_unit(bounds: tuple[float, float, float, float], moment: Moment) -> bool:
    x0, y0, x1, y1 = bounds
    places = zip(moment.x, moment.y, moment.alive, strict=True)
    return any(alive and x0 <= x <= x1 and y0 <= y <= y1 for x, y, alive in places)


class Episode(_Part):
    """One episode.

    Attributes:
        env, map_name, seed: what was played, from which reset seed. policy: who played, in words.
        values: what `Moment.values` are. results: of the episode (`return`, `battle_won`, ...).
        scene: what does not change. moments: T + 1, the last one after the last step.
    """

    env: str
    map_name: str
    seed: int
    policy: str
    values: Literal["Q-values", "probabilities"]
    results: dict[str, float]
    scene: Scene
    moments: list[Moment] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Episode:
        """Reject what cannot be drawn: the player and the pictures rely on what holds here."""
        words = (self.env, self.map_name, self.policy, *self.scene.ids, *self.scene.team_names, *self.scene.actions)
        if max(map(len, words)) > LONGEST_TEXT:
            raise ValueError("a text is too long")
        wrong = [*_faults_of_scene(self.scene)]
        for moment in self.moments:
            wrong = wrong or [*_faults_of_moment(self.scene, moment)]
        if wrong:
            raise ValueError(wrong[0])
        if len({bool(moment.seen) for moment in self.moments}) > 1:
            raise ValueError("only some moments say what is seen")
        if self.scene.bounds is not None and not any(_shows_a_unit(self.scene.bounds, each) for each in self.moments):
            raise ValueError("no living unit is on the map")
        return self

    @property
    def n_agents(self) -> int:
        """n."""
        return self.scene.teams.count(0)

    @property
    def length(self) -> int:
        """T."""
        return len(self.moments) - 1

    @property
    def label(self) -> str:
        """Environment and map."""
        return self.env if self.map_name == self.env else f"{self.env} {self.map_name}".strip()

    @property
    def outcome(self) -> str:
        """The result in words."""
        if self.results.get("draw", self.results.get("battle_draw", 0)):
            return "drawn"
        won = self.results.get("battle_won")
        return f"return {self.results.get('return', 0):.2f}" if won is None else "won" if won else "lost"


class Recording(_Part):
    """Episodes in the order in which they were played."""

    format: Literal["omagd recording"] = "omagd recording"
    version: Literal[1] = 1
    episodes: list[Episode] = Field(min_length=1)

    def packed(self) -> bytes:
        """Return the content of the file: JSON without defaults, compressed; equal recordings give equal bytes."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps({"format": self.format, "version": self.version, **values}, separators=(",", ":"))
        return gzip.compress(text.encode(), 6, mtime=0)

    def write(self, path: Path) -> Path:
        """Write the file, all of it or nothing."""
        replace_file(path, self.packed())
        return path

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a file. Errors: UserError for one that cannot be read, is damaged, or is no recording."""
        try:
            with gzip.open(path) as file:
                content = file.read(LARGEST + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise UserError(f"watch {path}: is damaged or no recording; {FIX}") from None
        except OSError as problem:
            raise UserError(f"watch {path}: cannot be read ({problem.strerror})") from None
        if len(content) > LARGEST:
            raise UserError(f"watch {path}: holds more than {LARGEST >> 20} MB; record fewer episodes")
        try:
            values: Any = json.loads(content, parse_constant=str)  # NaN and infinities, as `Number` has them
            if isinstance(values, dict) and values.get("version", 1) != 1:
                raise UserError(f"watch {path}: is of a later version ({values['version']}); update omagd")
            return cls.model_validate(values)
        except (ValueError, RecursionError, ValidationError):
            raise UserError(f"watch {path}: is no recording; {FIX}") from None


def save_recording(recording: Recording, path: Path, kind: str) -> Path:
    """Write `<path>.json.gz`, which `watch` opens, and `<path>.<kind>`; return the second. Errors: OSError."""
    recording.write(path.with_name(path.name + SUFFIX))
    return WRITERS.get(kind)(recording, path.with_name(f"{path.name}.{kind}"), 0)
