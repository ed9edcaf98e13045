"""Record games of the public 3v3 snakes engine, for tests/test_snakes_engine.py.

git clone https://github.com/jidiai/Competition_3v3snakes ENGINE
python benchmarks/record_snakes.py ENGINE [--random 1000] [--greedy 40]

Stored: every action, every draw of the engine (starts, replaced reversals, beans), and after each step a digest of the
whole state, chained, so that a digest that agrees means that the whole game up to it does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import types
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import numpy as np  # noqa: E402
from snakes_parity import GAMES, chained, pack_twos, state_values  # noqa: E402

DIRECTIONS = (-2, 2, -1, 1)


def load_engine(folder: str) -> tuple[Any, Any]:
    """Return the public engine's modules, of makers and of games; gym, which it imports without use, is left empty."""
    sys.path.insert(0, folder)
    for name in ("gym", "gym.utils", "gym.utils.seeding"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["gym.utils"].seeding = sys.modules["gym.utils.seeding"]
    return import_module("env.chooseenv"), import_module("env.snakes")


def cell(place: list[int]) -> int:
    """Return the number of a (row, column)."""
    return int(place[0]) * 20 + int(place[1])


def toward_beans(game: Any) -> list[int]:
    """Return actions that step toward the nearest bean where free, for long snakes and contested beans."""
    held = {cell(part) for snake in game.players for part in snake.segments}
    actions = []
    for snake in game.players:
        row, col = snake.segments[0]
        bean = min(game.beans_position, key=lambda b: abs(b[0] - row) + abs(b[1] - col))
        ways = [((row - 1) % 10, col), ((row + 1) % 10, col), (row, (col - 1) % 20), (row, (col + 1) % 20)]
        cost = [abs(r - bean[0]) + abs(c - bean[1]) + 100 * (r * 20 + c in held) for r, c in ways]
        actions.append(cost.index(min(cost)) if random.random() > 0.02 else random.randrange(4))
    return actions


class Notes:
    """What the engine draws, noted where it draws it.

    Args:
        engine: the module of the game's classes. game: one of its games.

    Attributes:
        turns: directions that replaced reversals. beans: cells, as they were laid out.
    """

    def __init__(self, engine: types.ModuleType, game: Any) -> None:
        self.turns: list[int] = []
        self.beans: list[int] = []
        lay_out, change = game.generate_beans, engine.Snake.change_direction

        def generate_beans() -> None:
            before = len(game.beans_position)
            lay_out()
            self.beans += [cell(bean) for bean in game.beans_position[before:]]

        def change_direction(snake: Any, action: int) -> None:
            reversal = action + snake.direction == 0
            change(snake, action)
            if reversal:
                self.turns.append(DIRECTIONS.index(snake.direction))

        game.generate_beans, engine.Snake.change_direction = generate_beans, change_direction


def play(game: Any, notes: Notes, greedy: bool) -> dict[str, Any]:
    """Play one game to its end; return its actions, draws and digests."""
    notes.turns, notes.beans = [], []
    game.reset()
    starts = [(cell(snake.segments[-1]), DIRECTIONS.index(snake.direction)) for snake in game.players]
    actions, digests, digest, over = [], [], np.zeros(1, np.uint64), False
    while not over:
        chosen = toward_beans(game) if greedy else [random.randrange(4) for _ in range(6)]
        _, rewards, over, _, after = game.step(game.encode(chosen))
        actions += chosen
        bodies = [[cell(part) for part in snake.segments] for snake in game.players]
        facing = [DIRECTIONS.index(snake.direction) for snake in game.players]
        beans = [cell(bean) for bean in game.beans_position]
        padded = np.array([[body + [-1] * (200 - len(body)) for body in bodies]])
        lists = (facing, beans, rewards, after["hit"], after["score"])
        digest = chained(digest, state_values(padded, *(np.array([values]) for values in lists), np.array([over])))
        digests.append(int(digest[0]) & 255)
    return {
        "starts": starts,
        "actions": actions,
        "turns": list(notes.turns),
        "beans": list(notes.beans),
        "digests": digests,
        "final": int(digest[0]),
    }


def save(games: list[dict[str, Any]]) -> None:
    """Write the games as tests/snakes_parity/__init__.py says."""
    joined = {name: [x for game in games for x in game[name]] for name in ("actions", "turns", "beans", "digests")}
    np.savez_compressed(
        GAMES,
        steps=np.array([len(game["digests"]) for game in games], np.uint8),
        starts=np.array([game["starts"] for game in games], np.uint8),
        actions=pack_twos(joined["actions"]),
        turns=pack_twos(joined["turns"]),
        beans=np.array(joined["beans"], np.uint8),
        digests=np.array(joined["digests"], np.uint8),
        n_turns=np.array([len(game["turns"]) for game in games], np.uint16),
        n_beans=np.array([len(game["beans"]) for game in games], np.uint16),
        final=np.array([game["final"] for game in games], np.uint64),
    )


def main() -> None:
    """Record, and print how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="checkout of the public engine")
    parser.add_argument("--random", type=int, default=1000, help="games of uniformly random actions")
    parser.add_argument("--greedy", type=int, default=40, help="games toward beans, for long snakes")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    start = time.monotonic()
    makers, engine = load_engine(args.engine)
    game = makers.make("snakes_3v3")
    notes = Notes(engine, game)
    games = [play(game, notes, number >= args.random) for number in range(args.random + args.greedy)]
    save(games)
    print(f"{len(games)} games in {time.monotonic() - start:.0f} s, {GAMES.stat().st_size} bytes: {GAMES}")


if __name__ == "__main__":
    main()
