"""The state as a set of units: embeddings whose sizes do not depend on the numbers of allies and enemies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.ops import FastLinear
from omagd.utils.errors import UserError

USUAL = 10.0  # numbers of units are divided by this, so that they are about 1


def present(units: Tensor) -> Tensor:
    """Return which units [..., D] are not zeros, [..., 1] bool; a unit of zeros is unseen, dead or absent."""
    return units.ne(0).any(dim=-1, keepdim=True)


class UnitEncoder(nn.Module):
    """Embeds a state of units: each ally for itself, and the whole.

    The whole is a function of the mean embedding of the living allies, that of the living enemies, their numbers, and
    the features that are no units' (Zaheer et al. 2017, "Deep sets", arXiv:1703.06114). So it does not depend on the
    order of units, nor on units of zeros, which are dead or absent. Allies know their last actions where the state has
    them; all attacks are one action.

    Args:
        config, info: the run and its environment. width: of the embeddings. key: the configuration that asks for it,
            such as "mixer=set_qmix", for errors.
    """

    def __init__(self, config: Config, info: EnvInfo, width: int, key: str) -> None:
        super().__init__()
        if info.state_layout is None:
            raise UserError(f"{key}: needs a state of units; env={config.env} has none")
        self.layout, self.n_normal = info.state_layout, info.n_normal_actions
        last = self.n_normal + 1 if self.layout.last_actions else 0
        self.n_others = info.state_dim - self.layout.width
        self.embed_ally = FastLinear(self.layout.ally_dim + last, width)
        self.embed_enemy = FastLinear(self.layout.enemy_dim, width)
        self.whole = FastLinear(2 * width + 2 + self.n_others, width)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the whole [S, width], the allies [S, n, width], and 1 for those that live [S, n, 1]."""
        allies, enemies, there, others = self._split(state)
        of_teams = self.embed_ally(allies).relu(), self.embed_enemy(enemies).relu()
        numbers = [living.sum(dim=1) for living in there]
        # Means and numbers, not sums: a sum of thirty units would be far from that of three.
        means = [
            (embedded * living).sum(dim=1) / number.clamp(min=1)
            for embedded, living, number in zip(of_teams, there, numbers, strict=True)
        ]
        whole = self.whole(torch.cat([*means, *(number / USUAL for number in numbers), others], dim=-1)).relu()
        return whole, of_teams[0], there[0]

    def _split(self, state: Tensor) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        """Return the features of allies and enemies, [S, k, D], 1 for those not zeros [S, k, 1], and the other ones."""
        layout, rows = self.layout, len(state)
        n, m = layout.n_allies, layout.n_enemies
        parts = [n * layout.ally_dim, m * layout.enemy_dim, n * layout.last_actions, self.n_others]
        own, theirs, last, others = state.split(parts, dim=-1)
        allies, enemies = own.view(rows, n, layout.ally_dim), theirs.view(rows, m, layout.enemy_dim)
        # Before last actions are added: a dead unit has none of its own features, but may have acted.
        there = [present(team).to(state.dtype) for team in (allies, enemies)]
        if layout.last_actions:
            shape = rows, n, layout.last_actions
            normal, attacks = last.view(shape).split([self.n_normal, layout.last_actions - self.n_normal], dim=-1)
            allies = torch.cat([allies, normal, attacks.sum(dim=-1, keepdim=True)], dim=-1)
        return allies, enemies, there, others
