"""Entry to the compiled snakes: compiles or loads the kernels once per process."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from omagd.envs.snakes.compiled.board import CompiledBoard
from omagd.envs.snakes.compiled.compiling import compiler
from omagd.envs.snakes.compiled.engine import CompiledEngine
from omagd.envs.snakes.compiled.rewards import CompiledLedger
from omagd.envs.snakes.features import state_features
from omagd.envs.snakes.observer import Observer
from omagd.envs.snakes.rewards import Prices


@lru_cache(maxsize=1)
def compiled() -> tuple[type[CompiledEngine], type[CompiledLedger]]:
    """Return the compiled engine and ledger."""
    compiler.prepare(_play_one_step)
    return CompiledEngine, CompiledLedger


def _play_one_step() -> None:
    """Call every kernel with the types that it always has."""
    engine, ledger = CompiledEngine(1), CompiledLedger(Prices("potential", 1.0, 1.0, 1.0), 1)
    row = team = np.zeros(1, np.int64)
    engine.reset(row, row)
    for obs in ("26", "near", "planes", "entities"):
        Observer(obs).observe(engine.board, team)
    state_features(engine.board, team)
    CompiledBoard.kernels["greedy"](engine.board, team)
    engine.board.random_bits(0, 1)
    before = ledger.potential(engine.board, team, row)
    outcome = engine.step(np.zeros((1, 6), np.int64), row)
    ledger.pay(outcome, engine.board, team, row, before)
