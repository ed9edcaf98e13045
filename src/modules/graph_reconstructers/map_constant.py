"""Reconstruction without a network: an unseen unit has the mean features of living ones at its place (`map_constant`).

The simplest predictor of stage 2, and the baseline that any other has to beat where starts and policies hardly vary. It
knows nothing of deaths: a unit stays filled in until the agent sees it.
Shapes: B slots, n agents, N nodes, D features, T longest episode.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.graph_reconstructers.reconstructor import Reconstruction, Reconstructor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer


class MapConstant(nn.Module):
    """The features of a unit by who does not see it, place in the graph and step; zeros until it is fitted.

    Attributes:
        table: [n, N, T + 1, D].
    """

    table: Tensor

    def __init__(self, info: EnvInfo) -> None:
        super().__init__()
        assert info.layout is not None
        shape = (info.n_agents, info.layout.n_nodes, info.episode_limit + 1, info.layout.node_dim)
        self.register_buffer("table", torch.zeros(shape))

    def forward(self, agent: Tensor, node: Tensor, step: Tensor) -> Tensor:
        """Return the features [M, D] of the nodes `node` of the agents `agent` at `step`, [M] each."""
        return self.table[agent, node, step.clamp(max=self.table.shape[2] - 1)]


class MapConstantReconstructor(Reconstructor):
    """Fills in what agents do not see from the table. It remembers nothing, so that slots have no state.

    As with other predictors, the result is rounded and stored with the step, and agents act on the stored values.

    Args:
        tokenizer: not read. predictor: fitted. config: not read. info: of an environment with a layout.
    """

    shape_keys = ("kind",)
    pretraining = ("stage2",)

    def __init__(self, tokenizer: Tokenizer | None, predictor: MapConstant, config: Config, info: EnvInfo) -> None:
        assert info.layout is not None
        super().__init__(info.layout, predictor.table.device)
        self.predictor = predictor.eval()
        self.begin(0)

    @classmethod
    def new_predictor(cls, config: Config, info: EnvInfo) -> MapConstant:
        """Return a table of zeros."""
        return MapConstant(info)

    @torch.no_grad()
    def begin(self, n_slots: int) -> None:
        """Use the current table: of each step the observations [n, obs_dim] in which every other unit is filled in."""
        n_agents, n_nodes, n_steps, _ = self.predictor.table.shape
        sizes = (torch.arange(size, device=self.device) for size in (n_steps, n_agents, n_nodes))
        step, agent, node = torch.cartesian_prod(*sizes).unbind(1)
        features = self.predictor(agent, node, step).view(n_steps, n_agents, n_nodes, -1)
        self._filled = self.columns.obs(features).half()

    def _fill(self, obs: Tensor, now: Tensor, played: Tensor, actions: Tensor) -> Reconstruction:
        missing = self.columns.sight(obs)[1] & played[:, None, None]
        filled = self._filled[now.clamp(max=len(self._filled) - 1)]
        return self.made(obs, torch.where(self.columns.of_nodes(missing), filled, 0.0), missing)
