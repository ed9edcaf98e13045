"""Boards whose observations and scripts are computed by kernels; each function returns what the reference returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from omagd.envs.snakes.board import N_BEANS, N_SNAKES, N_TEAM, Board
from omagd.envs.snakes.compiled import flat, near, scripts, views
from omagd.envs.snakes.compiled.tables import arrays_of
from omagd.envs.snakes.features import NEAR_DIM, SCALES, STATE_DIM
from omagd.envs.snakes.observer import ENTITY_DIM, EVERYTHING, PLANES_DIM
from omagd.envs.snakes.opponents import PENALTIES
from omagd.utils.compiling import as_kernels_take


def _sides(board: Board, team: np.ndarray) -> np.ndarray:
    return as_kernels_take("teams", team, np.int64, (len(board),))


def _flat(board: Board, team: np.ndarray, name: str, normalise: bool) -> np.ndarray:
    scale = SCALES[name] if normalise else np.ones_like(SCALES[name])
    out = np.empty((len(board), N_TEAM, len(scale)), np.float32)
    flat.flat(arrays_of(board), _sides(board, team), int(name), scale, out)
    return out


def _near(board: Board, team: np.ndarray) -> np.ndarray:
    out, steps = np.empty((len(board), N_TEAM, NEAR_DIM), np.float32), np.empty((N_SNAKES, N_BEANS), np.int64)
    far, order = np.empty((2, N_SNAKES - 1), np.int64)
    near.near(arrays_of(board), _sides(board, team), steps, far, order, out)
    return out


def _state(board: Board, team: np.ndarray) -> np.ndarray:
    out = np.empty((len(board), STATE_DIM), np.float32)
    flat.state(arrays_of(board), _sides(board, team), out)
    return out


def _entities(board: Board, team: np.ndarray, sight: float | None, full: bool) -> tuple[np.ndarray, np.ndarray | None]:
    def show(limit: float) -> np.ndarray:
        out = np.empty((len(board), N_TEAM, ENTITY_DIM), np.float32)
        views.entities(arrays_of(board), _sides(board, team), np.float32(sight or EVERYTHING), np.float32(limit), out)
        return out

    return show(sight or np.inf), show(np.inf) if full else None


def _planes(board: Board, team: np.ndarray, centred: bool) -> np.ndarray:
    out = np.empty((len(board), N_TEAM, PLANES_DIM), np.float32)
    views.planes(arrays_of(board), _sides(board, team), centred, out)
    return out


def _act(board: Board, team: np.ndarray, kind: int, penalty: float = 0.0) -> np.ndarray:
    out = np.empty((len(board), N_TEAM), np.int64)
    scripts.act(arrays_of(board), _sides(board, team), kind, penalty, np.empty(N_TEAM, np.int64), out)
    return out


_SCRIPTS = {"random": scripts.RANDOM, "greedy": scripts.GREEDY, "evasion": scripts.EVASION}


class CompiledBoard(Board):
    """A `Board` for kernels."""

    kernels: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "flat_features": _flat,
        "near_features": _near,
        "state_features": _state,
        "entity_features": _entities,
        "plane_features": _planes,
        **{name: partial(_act, kind=kind) for name, kind in _SCRIPTS.items()},
        **{name: partial(_act, kind=scripts.TOWARD_NEAREST, penalty=cells) for name, cells in PENALTIES.items()},
    }

    def random_bits(self, first: int, n: int) -> np.ndarray:
        """Return random uint64 [B, n] of the current step for players, with the indices from `first` on."""
        out = np.empty((len(self), n), np.uint64)
        scripts.random_bits(arrays_of(self), first, out)
        return out
