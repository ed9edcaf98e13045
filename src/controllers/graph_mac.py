"""Controllers that act on reconstructed observations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from omagd.components.episode_codec import Spec
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.types import Decision, Exploration, Tick
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.graph_reconstructers import INFERRED, REGISTRY, n_inferred
from omagd.modules.graph_reconstructers.last_sight import FILLS
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch

if TYPE_CHECKING:
    from omagd.modules.graph_reconstructers.reconstructor import Reconstructor


class NGraphMAC(BasicMAC):
    """Agents read the flat observation, with reconstructed units where they see nothing.

    A reconstruction is computed once, while acting, and stored with the row; the learner reads the stored one.
    Without a reconstructor the agents read `obs` (the baseline), or `full_obs` under `use_full_obs` (the upper bound).
    """

    reads_reconstructions = True

    def __init__(
        self, config: Config, info: EnvInfo, device: torch.device, reconstructor: Reconstructor | None = None
    ) -> None:
        if info.layout is None:
            raise UserError(
                f"mac={config.mac} needs an environment with an entity layout; env={config.env} has none."
                " Use mac=n_mac, or an environment with units, such as --env-config=skirmish"
            )
        if reconstructor is not None and config.use_full_obs:
            raise UserError("use_full_obs=True leaves nothing to reconstruct: set use_graph_reconstruction=False")
        self.reconstructor = reconstructor
        self._infers = n_inferred(config, info.layout) > 0
        super().__init__(config, info, device, reconstructor)

    @classmethod
    def extra_fields(cls, config: Config, info: EnvInfo) -> Spec:
        """Return the fields of the reconstructions, if there are any, and those of the choice of actions."""
        kind: type[Reconstructor] | None = None
        if config.fill_unseen != "none":
            kind = FILLS[config.fill_unseen]
        elif config.use_graph_reconstruction:
            kind = REGISTRY.get(config.mask_predictor_config.kind)
        more = super().extra_fields(config, info)
        return more if kind is None or info.layout is None else {**kind.fields(config, info), **more}

    def begin(self, n_slots: int) -> None:
        """Reset the memory to that of B slots, with the reconstructor's history."""
        super().begin(n_slots)
        self._shown = np.zeros(n_slots, bool)
        if self.reconstructor is not None:
            self.reconstructor.begin(n_slots)

    def reset(self, which: np.ndarray) -> None:
        """Reset the memory of the slots `which` ([B] bool)."""
        super().reset(which)
        if self.reconstructor is not None:
            self.reconstructor.reset(which)

    def snapshot(self) -> dict[str, Any]:
        """Return the memory of all slots, with the reconstructor's history."""
        history = {} if self.reconstructor is None else {"history": self.reconstructor.snapshot()}
        return {**super().snapshot(), **history, "shown": self._shown.copy()}

    def load_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Restore a `snapshot` of as many slots."""
        super().load_snapshot(snapshot)
        self._shown = snapshot["shown"].copy() if "shown" in snapshot else np.zeros(len(self._hidden), bool)
        if self.reconstructor is not None:
            self.reconstructor.load_snapshot(snapshot["history"])

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        """Choose actions in the active slots; the other slots' histories do not change."""
        self._draw_shown(tick, explore)
        return super().act(tick, explore)

    def _draw_shown(self, tick: Tick, explore: Exploration | None) -> None:
        """Draw which of the episodes that begin show all units."""
        begun = tick.active & (tick.step == 0)
        self._shown[begun] = False
        if explore is not None and explore.truth > 0 and begun.any():
            self._shown[begun] = explore.rng.random(int(begun.sum())) < explore.truth

    def _build_inputs(self, tick: Tick) -> tuple[AgentInputs, dict[str, np.ndarray]]:
        if self.reconstructor is None:
            return super()._build_inputs(tick)
        obs = self.read(tick.observation)
        if not self._shown.any():
            made = self.reconstructor.step(obs, tick.step, tick.active, self._last_action)
        else:  # what is shown needs no guess, and what an agent remembers of it is never asked for
            truth = tick.observation.full_obs
            assert truth is not None  # `truth_until` asks for it
            made = self.reconstructor.step(obs, tick.step, tick.active & ~self._shown, self._last_action)
            shown = torch.from_numpy(self._shown & tick.active)
            made = made.with_truth(torch.from_numpy(truth), shown, self.reconstructor.columns)
        features = made.obs.to(self.acting_device, self._hidden.dtype)
        extras = {name: value.cpu().numpy() for name, value in made.fields.items()}
        inferred = made.fields[INFERRED].to(features) if self._infers else None
        return AgentInputs(features, self._last_action, made.guessed.to(self.acting_device), inferred), extras

    def inputs(self, batch: PackedBatch) -> AgentInputs:
        """Return the inputs of all rows of a batch, equal to those that were acted on."""
        made = super().inputs(batch)
        if self._infers and self.reconstructor is not None:
            return replace(made, inferred=batch[INFERRED].to(made.features))
        return made

    def _inputs_from_batch(self, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        if self.reconstructor is None:
            return super()._inputs_from_batch(batch)
        return self.reconstructor.restore(batch.data)


class GNNGraphMAC(NGraphMAC):
    """The same for agents that build graphs from the flat observation (`gnn_rnn`); the conversion is exact."""
