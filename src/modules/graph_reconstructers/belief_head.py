"""The belief head: what an agent's memory says of the units that it does not see, as an auxiliary task.

A recurrent agent remembers what it has seen in its hidden state h. The head reads h and predicts for each other unit u
of the battle (U = N - 1 allies and enemies) whether it lives and what it is like. With `belief_loss: features`

    l, z = W_l k + b_l, W_z k + b_z,   k = relu(W h + b),    p(u lives) = sigmoid(l_u),    x_u = m_u + s_u z_u

for all units at once, where m_u and s_u are the running mean and deviation of the features x_u of unit u while it
lives. With `tokens`

    v = W_v k + b_v,   k = relu(W h + b),    p(code of u) = softmax(E v_u + c)

over the K codes of stage 1 and ABSENT (dead): masked-token prediction as in stage 2, within the agent. The loss is in
learners/belief_loss.py. Agents never read the head, so acting costs nothing and needs no full view.

Related: a decoder of the belief state as an auxiliary loss (Moreno et al. 2018, "Neural belief states for partially
observed domains"; Gregor et al. 2019, arXiv:1906.09237).
Shapes: R rows, n agents, H hidden units, U other units, D features of a unit, K codes, M missing nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.modules.graph_reconstructers.reconstructor import Belief
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.modules.ops import FastLinear
from omagd.utils.seeding import stream_seed

TOKEN_DIM = 32  # width of what a unit's logits over codes are computed from
DEAD = 0.5  # from this probability of being dead on, a unit is taken for dead


class BeliefHead(nn.Module):
    """Predicts the other units from an agent's hidden state; the same head for all agents.

    Args:
        config: `belief_loss`, `rnn_hidden_dim` and, for tokens, the number of codes. info: of an environment with a
            layout.

    Attributes:
        mean, deviation: [U, D], of the features of living units. A deviation of 0: the feature does not vary, so it is
            no news and the mean says it.
        table: [K, features of a node], decoded features of stage 1's codes (`tokens`).
    """

    mean: Tensor
    deviation: Tensor
    table: Tensor

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        assert info.layout is not None
        hidden, self.layout, self.padded = config.rnn_hidden_dim, info.layout, info.padded
        self.n_units, self.dim = self.layout.n_nodes - 1, max(self.layout.ally_dim, self.layout.enemy_dim)
        self.tokens, n_codes = config.belief_loss == "tokens", config.tokenizer_config.n_codes
        self._tokenizer: list[Tokenizer] = []
        self.hidden = FastLinear(hidden, hidden)
        if self.tokens:
            self.units = FastLinear(hidden, self.n_units * TOKEN_DIM)
            self.codes = FastLinear(TOKEN_DIM, n_codes + 1)
            self.register_buffer("table", torch.zeros(n_codes, self.layout.node_dim))
        else:
            self.lives = FastLinear(hidden, self.n_units)
            self.features = FastLinear(hidden, self.n_units * self.dim)
            self.register_buffer("mean", torch.zeros(self.n_units, self.dim))
            self.register_buffer("deviation", torch.zeros(self.n_units, self.dim))

    def learn_codes(self, tokenizer: Tokenizer) -> None:
        """Predict the codes of stage 1's tokenizer from now on (`tokens`)."""
        self._tokenizer = [tokenizer]  # in a list: no part of this module, and not saved with it
        self.table.copy_(tokenizer.table())

    @torch.no_grad()
    def codes_of(self, units: Tensor, living: Tensor) -> Tensor:
        """Return the code of each unit [...] int64, K (ABSENT) for the dead. units: [..., D]. living: [...] bool."""
        (tokenizer,) = self._tokenizer
        return torch.where(living, tokenizer.ids(units), tokenizer.n_codes)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the logit of living [..., U] and the standardised features [..., U, D], or logits [..., U, K + 1].

        hidden: [..., H].
        """
        # A layer between memory and task, so that the memory need not be in the units' own coordinates.
        known = F.relu(self.hidden(hidden))
        if self.tokens:
            return (self.codes(self.units(known).unflatten(-1, (self.n_units, -1))),)
        return self.lives(known), self.features(known).unflatten(-1, (self.n_units, -1))

    @torch.no_grad()
    def belief(self, hidden: Tensor, missing: Tensor) -> Belief:
        """Return the belief about the `missing` [S, n, N] nodes, from hidden states [S, n, H]."""
        row, agent, node = missing.nonzero(as_tuple=True)
        outputs = [part[row, agent, node - 1].to(self.hidden.weight.dtype) for part in self(hidden)]
        spread = None
        if self.tokens:
            p = outputs[0].softmax(-1)
            # Given that it lives, its codes: their mean is the guess, their deviation says how sure it is.
            p_dead, lives = p[:, -1], p[:, :-1] / p[:, :-1].sum(-1, keepdim=True).clamp(min=1e-12)
            features = lives @ self.table
            spread = (lives @ self.table.square() - features.square()).clamp(min=0).sqrt()
        else:
            p_dead = torch.sigmoid(-outputs[0])
            # Back from standardised features to those of the environment.
            features = self.mean[node - 1] + self.deviation[node - 1] * outputs[1]
            features = F.pad(features, (0, self.layout.node_dim - self.dim))
        dead = p_dead > DEAD
        return Belief(features.masked_fill(dead[:, None], 0.0), p_dead, dead, spread)

    def filled(self, obs: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return obs [S, n, obs_dim] with beliefs in place of missing units, and these [S, n, N] bool.

        hidden: [S, n, H], after these observations.
        """
        obs, hidden = obs.to(self.hidden.weight.device), hidden.to(self.hidden.weight)
        columns = GraphTables(self.layout, obs.device)
        missing = columns.sight(obs)[1]
        nodes = torch.zeros((*missing.shape, self.layout.node_dim), device=obs.device)
        nodes[missing] = self.belief(hidden, missing).features.to(nodes)
        return torch.where(columns.of_nodes(missing), columns.obs(nodes).to(obs.dtype), obs), missing


def new_head(config: Config, info: EnvInfo, like: Tensor) -> BeliefHead:
    """Return an untrained head, the same on every rank, of the float type and on the device of `like`.

    Other random numbers go on as if none had been drawn, so that agent and mixer start as they do without a head.
    """
    # A run with a head starts from the weights of a run without one, so that the two can be compared.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, "belief head"))
        return BeliefHead(config, info).to(like.device, like.dtype)
