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
from omagd.controllers.types import Tick
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.graph_reconstructers import INFERRED, REGISTRY, n_inferred
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
        layout = info.layout_for(f"mac={config.mac}", config.env)
        if reconstructor is not None and config.use_full_obs:
            raise UserError("use_full_obs=True leaves nothing to reconstruct: set use_graph_reconstruction=False")
        self.reconstructor = reconstructor
        self._infers = n_inferred(config, layout) > 0
        super().__init__(config, info, device, reconstructor)

    @classmethod
    def extra_fields(cls, config: Config, info: EnvInfo) -> Spec:
        """Return the fields of the reconstructions, if there are any, and those of the choice of actions."""
        more = super().extra_fields(config, info)
        if not config.use_graph_reconstruction or info.layout is None:
            return more
        return {**REGISTRY.get(config.mask_predictor_config.kind).fields(config, info), **more}

    def begin(self, n_slots: int) -> None:
        """Reset the memory to that of B slots, with the reconstructor's history."""
        super().begin(n_slots)
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
        return {**super().snapshot(), **history}

    def load_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Restore a `snapshot` of as many slots."""
        super().load_snapshot(snapshot)
        if self.reconstructor is not None:
            self.reconstructor.load_snapshot(snapshot["history"])

    def _build_inputs(self, tick: Tick) -> tuple[AgentInputs, dict[str, np.ndarray]]:
        if self.reconstructor is None:
            return super()._build_inputs(tick)
        made = self.reconstructor.step(self.read(tick.observation), tick.step, tick.active, self._last_action)
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
