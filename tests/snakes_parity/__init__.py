"""Stored games of the public engine: their format, and a digest of a game's state that both engines can compute.

games.npz: steps [G]; starts [G, 6, 2] (cell of the tail, direction); actions and turns (what replaced reversals, in the
order of steps, then snakes), two bits each; n_turns, n_beans [G]; beans, in the order in which they were laid out;
digests, the last byte after every step; final [G], the whole digest after the last one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from omagd.envs.snakes.engine import Recorded

GAMES = Path(__file__).resolve().parent / "games.npz"
N_VALUES = 6 * 200 + 30
_SHIFT = 256  # added to values that may be negative


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(31))) * np.uint64(0x7FB5D329728EA185)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x81DADEF4BC2DD44D)
    return z ^ (z >> np.uint64(33))


_WEIGHTS = _mix(np.arange(1, N_VALUES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def chained(before: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the digests [B] uint64 of states with `values` [B, N_VALUES] that follow on digests `before` [B]."""
    total = ((values.astype(np.int64) + _SHIFT).astype(np.uint64) * _WEIGHTS).sum(1, dtype=np.uint64)
    return _mix(before ^ total)


def state_values(bodies, directions, beans, raw, hit, score, over) -> np.ndarray:
    """Return [B, N_VALUES] int64 of B boards: bodies [B, 6, L], head first, then -1; over [B]; the others [B, m]."""
    values = np.full((len(over), N_VALUES), -1, np.int64)
    values[:, :1200].reshape(-1, 6, 200)[:, :, : bodies.shape[2]] = bodies
    rest = np.concatenate([directions, beans, raw, hit, score, np.reshape(over, (-1, 1))], 1)
    values[:, 1200 : 1200 + rest.shape[1]] = rest
    return values


def pack_twos(values) -> np.ndarray:
    """Return numbers 0 to 3 as bytes, four in each."""
    values = np.asarray(values, np.uint8)
    return np.packbits(((values[:, None] >> np.array([1, 0], np.uint8)) & 1).reshape(-1))


def unpack_twos(packed: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` numbers of `pack_twos`."""
    bits = np.unpackbits(packed)[: 2 * count].reshape(-1, 2)
    return (2 * bits[:, 0] + bits[:, 1]).astype(np.int64)


def stored_draws(kept: dict[str, np.ndarray]) -> Recorded:
    """Return the stored draws of the public engine."""
    n_turns, n_beans = kept["n_turns"].astype(np.int64), kept["n_beans"].astype(np.int64)
    turns = unpack_twos(kept["turns"], int(n_turns.sum()))
    first = n_turns.cumsum() - n_turns, n_beans.cumsum() - n_beans
    return Recorded(kept["starts"].astype(np.int64), turns, kept["beans"].astype(np.int64), *first)


def load() -> tuple[np.ndarray, Recorded, dict[str, np.ndarray]]:
    """Return actions [G, T, 6] (zero after a game's end), the draws, and steps, digests [G, T] and final [G]."""
    with np.load(GAMES) as file:
        kept = {name: file[name] for name in file.files}
    steps = kept["steps"].astype(np.int64)
    played = np.arange(steps.max()) < steps[:, None]
    actions = np.zeros((*played.shape, 6), np.int64)
    actions[played] = unpack_twos(kept["actions"], 6 * int(steps.sum())).reshape(-1, 6)
    digests = np.zeros(played.shape, np.uint8)
    digests[played] = kept["digests"]
    return actions, stored_draws(kept), {"steps": steps, "digests": digests, "final": kept["final"]}
