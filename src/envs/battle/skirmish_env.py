"""The environment `skirmish`: SMAC's semantics with the built-in simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from pydantic import BaseModel

from omagd.config.env_info import EnvInfo
from omagd.envs.battle.args import POLICIES, SkirmishArgs
from omagd.envs.battle.features import battle_info
from omagd.envs.battle.maps import is_custom
from omagd.envs.battle.semantics import BattleEnv, BattleSemantics
from omagd.envs.protocol import ResidentGame, StepResult
from omagd.utils.compiling import require_numba
from omagd.utils.errors import UserError

if TYPE_CHECKING:
    import torch


class SkirmishEnv(BattleEnv):
    """Battles on SMAC's maps without the game: same sizes and features, different physics (docs/skirmish.md).

    Args:
        args: map and flags. n_slots: number of parallel battles.
    """

    args_model: ClassVar[type[BaseModel]] = SkirmishArgs

    def __init__(self, args: SkirmishArgs, n_slots: int) -> None:
        self.info = self.describe(args)
        spec = args.spec
        self.n_slots, self.spec, self.args = n_slots, spec, args
        self._seed: int | None = None
        simulator, semantics = self.engine()
        self._simulator = simulator(spec, n_slots, difficulty=args.difficulty)
        self._semantics = semantics(spec, args, self._simulator)

    @staticmethod
    def engine() -> tuple[Any, Any]:
        """Return the classes that play and judge battles. Errors: UserError without Numba."""
        require_numba("env=skirmish")
        from omagd.envs.battle.compiled.engine import compiled

        return compiled()

    @classmethod
    def describe(cls, args: SkirmishArgs) -> EnvInfo:
        """Return the facts of an environment without building it, which loads the kernels. Errors: UserError."""
        if is_custom(args.map_name):
            raise UserError(f"env_args.map_name={args.map_name} needs the game: use --env-config=sc2")
        return battle_info("skirmish", args.spec, args, scripted_policies=POLICIES)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new battles in the slots `which` [B] bool, slot b from `seeds[b]`."""
        self._simulator.reset(which, seeds)
        self._semantics.begin(which)
        if which[0]:
            self._seed = int(seeds[0])

    def rules(self) -> BattleSemantics:
        """Return the semantics of the battles."""
        return self._semantics

    def seed(self) -> int | None:
        """Return the seed of the battle in the first slot, None before the first `reset`."""
        return self._seed

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` [B, n] in the `active` slots. Errors: ValueError for an action that is not available."""
        return self._semantics.step(actions, active)

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [B, n] actions of `random`, `attack_nearest`, `focus_fire` or `kiting`."""
        if policy == "random" or policy not in POLICIES:
            return super().scripted_actions(policy, rng)
        from omagd.envs.battle.scripted import Scene, choose  # most runs play no scripts

        semantics = self._semantics
        scene = Scene(self._simulator.units, semantics.geometry(), semantics.avail_actions())
        return choose(policy, scene)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole simulation as arrays and plain values."""
        return {"simulator": self._simulator.snapshot(), "semantics": self._semantics.snapshot()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot` of an environment with the same arguments."""
        self._simulator.restore(snapshot["simulator"])
        self._semantics.restore(snapshot["semantics"])

    @staticmethod
    def why_not_resident(args: SkirmishArgs, on_gpu: bool) -> str:
        """Return nothing: whatever the arguments, battles are played there."""
        return ""

    def resident(self, device: torch.device, n_slots: int) -> ResidentGame:
        """Return `n_slots` battles of the same map on a device."""
        from omagd.envs.battle.compiled.resident import ResidentBattles

        return ResidentBattles(self.spec, cast(SkirmishArgs, self.args), n_slots, device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by a snapshot: many arrays are views of others, and would become copies of their own."""
        return _restored, (type(self), self.args, self.n_slots, self.snapshot(), self._seed)

    def get_stats(self) -> dict[str, float]:
        """Return counts of battles since construction: played, won, run into the step limit."""
        return self._semantics.stats()


def _restored(
    cls: type[SkirmishEnv], args: SkirmishArgs, n_slots: int, snapshot: dict[str, Any], seed: int | None
) -> SkirmishEnv:
    env = cls(args, n_slots)
    env.restore(snapshot)
    env._seed = seed
    return env
