"""Agents: networks from one agent's observations to the values of its actions; all agents share the weights."""

from __future__ import annotations

from omagd.utils.registry import Registry

REGISTRY: Registry[type] = Registry(
    "agent",
    "omagd.agents",
    lazy={
        "rnn": "omagd.modules.agents.agent:RNNAgent",
        "n_rnn": "omagd.modules.agents.agent:NRNNAgent",
        "cnn_rnn": "omagd.modules.agents.cnn_agent:CNNAgent",
        "tarmac": "omagd.modules.agents.tarmac_agent:TarMACAgent",
        "ff": "omagd.modules.agents.ff_agent:FFAgent",
        "ddpg": "omagd.modules.agents.ff_agent:DDPGAgent",
        "bicnet": "omagd.modules.agents.ff_agent:BiCNetAgent",
        "hpn_rnn": "omagd.modules.agents.entity_agents:HPNAgent",
        "attention_rnn": "omagd.modules.agents.entity_agents:AttentionAgent",
        "gnn_rnn": "omagd.modules.agents.gnn_rnn_agent:GNNRNNAgent",
    },
    protocol="omagd.modules.agents.agent:Agent",
)
