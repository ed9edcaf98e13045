"""The compiled simulator: the reference's arrays, played by kernels."""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.compiled import starts
from omagd.envs.battle.compiled.tables import LANES, State, make_tables, shared_memory
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.roster import Battle
from omagd.envs.battle.simulator import Simulator
from omagd.utils.compiling import as_kernels_take


class CompiledSimulator(Simulator):
    """`Simulator` whose battles `CompiledSemantics.step` plays; all that it shows is the reference's, bit for bit."""

    def __init__(self, map_spec: MapSpec, n_slots: int, *, difficulty: str = "7") -> None:
        super().__init__(map_spec, n_slots, difficulty=difficulty)
        self.tables = make_tables(self._roster, self._movement, self._sight)
        self.starts = starts.make_starts(map_spec, self._roster)
        self.memory = shared_memory()
        # A battle's numbers lie side by side here, so that one is played within the processor's nearest memory; the
        # reference's arrays become views.
        arrays = self._battle.floats, self._battle.ints, self._cooldown, self._alive
        self.state = State(*(side_by_side(array, int(self.tables.fact[LANES])) for array in arrays))
        floats, ints, self._cooldown, self._alive = (
            np.moveaxis(array[..., : self._roster.total], 0, -1) for array in self.state
        )
        self._battle = Battle(floats, ints)
        self.units = self._views()

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new battles in the slots `which` ([B] bool), slot b from `seeds[b]`."""
        begun = as_kernels_take("which", which, bool, (self.n_slots,))
        numbers = as_kernels_take("seeds", seeds, np.int64, (self.n_slots,))
        starts.reset(self.tables, self.starts, self.state, begun, numbers)


def side_by_side(array: np.ndarray, lanes: int) -> np.ndarray:
    """Return a copy of [.., U, B] as [B, .., lanes], with zeros behind the units."""
    out = np.zeros((array.shape[-1], *array.shape[:-2], lanes), array.dtype)
    out[..., : array.shape[-2]] = np.moveaxis(array, -1, 0)
    return out
