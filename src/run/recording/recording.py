"""Recordings of episodes: the format, and its file (`*.json.gz`), which `watch FILE` opens.

Letters: n agents, U units (the agents first), A actions, T steps.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omagd.envs.frames import AGENTS, LARGEST_PICTURE, OPPONENTS, THINGS, Scene
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
    picture: str = ""
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


def _near(*values: Number, least: float = -FARTHEST) -> bool:
    """Return whether all values that are numbers are distances that can be drawn."""
    return all(isinstance(value, str) or least <= value <= FARTHEST for value in values)


def _box(x0: float, y0: float, x1: float, y1: float, least: float) -> bool:
    """Return whether this is a rectangle whose sides have at least this length."""
    return _near(x0, y0, x1, y1) and x1 - x0 >= least and y1 - y0 >= least


def _belongs(moment: Moment, scene: Scene) -> bool:
    """Return whether a moment has the units and agents of a scene, numbered as there, at places that can be drawn."""
    units, n = len(scene.ids), scene.teams.count(AGENTS)
    of_units = (moment.health, moment.shield, moment.targets, moment.bodies)
    of_agents = (moment.actions, moment.values, moment.seen, moment.beliefs)
    beliefs = [belief for each in moment.beliefs for belief in each]
    return (
        {len(moment.x), len(moment.y), len(moment.alive), *(len(part) for part in of_units if part)} == {units}
        and all(len(part) in (0, n) for part in of_agents)
        and (bool(moment.health) or not any(scene.health_max))
        and (bool(moment.shield) or not any(scene.shield_max))
        and len(moment.score) == (2 if scene.score else 0)
        and all(map(SEEN.fullmatch, moment.seen))
        and _near(*moment.x, *moment.y, *(place for _, *xy, _ in beliefs for place in xy))
        and all(len(body) % 2 == 0 and _near(*body) for body in moment.bodies)
        and (scene.bounds is not None or not any(moment.bodies))
        and all(0 <= unit < units and moment.alive[unit] for unit in moment.marked)
        and all(action >= 0 for action in moment.actions)
        and all(0 <= unit < units for unit, *_ in beliefs)
        and (not moment.picture or _is_small_png(moment.picture))
    )


def _is_small_png(picture: str) -> bool:
    """Return whether this is the beginning of a PNG of a size that is drawn, in base64."""
    try:
        head = base64.b64decode(picture, validate=True)[:24]
    except ValueError:
        return False
    sides = int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    return head.startswith(b"\x89PNG\r\n\x1a\n") and 0 < min(sides) <= max(sides) <= LARGEST_PICTURE


def _shows_a_unit(moment: Moment, x0: float, y0: float, x1: float, y1: float) -> bool:
    return any(
        alive and x0 <= x <= x1 and y0 <= y <= y1 for x, y, alive in zip(moment.x, moment.y, moment.alive, strict=True)
    )


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
        scene, units, n = self.scene, len(self.scene.ids), self.n_agents
        words = (self.env, self.map_name, self.policy, *scene.ids, *scene.team_names, *scene.actions)
        if not (
            0 < n <= units <= MOST_UNITS
            and max(map(len, words)) <= LONGEST_TEXT
            and len(scene.teams) == len(scene.kinds) == len(set(scene.ids)) == units
            and not any(scene.teams[:n])
            and {*scene.teams} <= {*TEAMS[: len(scene.team_names)]}
            and (len(scene.team_names) >= 2 or not scene.score)
            and (_box(*scene.bounds, least=1) if scene.bounds else not scene.torus)
            and all(_box(*wall, least=0) for wall in scene.walls)
            and all(0 <= most < math.inf for most in (*scene.health_max, *scene.shield_max))
            and _near(*scene.sight, *scene.reach, least=0)
            and all(len(part) in (0, units) for part in (scene.health_max, scene.shield_max, scene.heals))
            and all(len(part) in (0, n) for part in (scene.sight, scene.reach))
            and all(_belongs(moment, scene) for moment in self.moments)
            and len({bool(moment.seen) for moment in self.moments}) == 1
            and (scene.bounds is None or any(_shows_a_unit(moment, *scene.bounds) for moment in self.moments))
        ):
            raise ValueError("what it holds cannot be drawn")
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
