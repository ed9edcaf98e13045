"""Multi-agent controllers: build the agents' inputs, hold what they remember, select actions."""

from __future__ import annotations

from omagd.utils.registry import Registry

REGISTRY: Registry[type] = Registry(
    "mac",
    "omagd.controllers",
    lazy={
        "basic_mac": "omagd.controllers.basic_mac:BasicMAC",
        "ddpg_mac": "omagd.controllers.ddpg_mac:DDPGMAC",
        "n_mac": "omagd.controllers.basic_mac:NMAC",
        "n_graph_mac": "omagd.controllers.graph_mac:NGraphMAC",
        "gnn_graph_mac": "omagd.controllers.graph_mac:GNNGraphMAC",
    },
)
