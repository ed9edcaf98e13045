"""Entry to the compiled battles: compiles or loads the kernels once per process."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.compiled.compiling import compiler
from omagd.envs.battle.compiled.semantics import CompiledSemantics
from omagd.envs.battle.compiled.simulator import CompiledSimulator
from omagd.envs.battle.maps import get_map
from omagd.envs.battle.units import UNITS


@lru_cache(maxsize=1)
def compiled() -> tuple[type[CompiledSimulator], type[CompiledSemantics]]:
    """Return the compiled simulator and semantics, ready to play any map."""
    compiler.prepare(_play_one_step)
    return CompiledSimulator, CompiledSemantics


def _play_one_step() -> None:
    """Call every kernel, with the types that it has on all maps and with all flags."""
    spec, one = get_map("3m"), np.ones(1, bool)
    simulator = CompiledSimulator(spec, 1)
    semantics = CompiledSemantics(spec, SkirmishArgs(map_name="3m"), simulator, [unit.name for unit in UNITS])
    simulator.reset(one, np.zeros(1, np.int64))
    semantics.begin(one)
    semantics.observe(full=True)
    semantics.step(np.ones((1, spec.n_agents), np.int64), one)
