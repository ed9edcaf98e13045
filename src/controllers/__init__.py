"""Multi-agent controllers: build the agents' inputs, hold what they remember, select actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omagd.utils.registry import Registry

if TYPE_CHECKING:
    from omagd.controllers.types import MAC

REGISTRY: Registry[type[MAC]] = Registry(
    "mac",
    "omagd.controllers",
    lazy={
        "basic_mac": "omagd.controllers.basic_mac:BasicMAC",
        "ddpg_mac": "omagd.controllers.ddpg_mac:DDPGMAC",
        "n_mac": "omagd.controllers.basic_mac:BasicMAC",  # the name in PyMARL2's configurations
        "n_graph_mac": "omagd.controllers.graph_mac:NGraphMAC",
        "gnn_graph_mac": "omagd.controllers.graph_mac:NGraphMAC",  # `gnn_rnn` builds its graphs itself
    },
    protocol="omagd.controllers.types:MAC",
)
