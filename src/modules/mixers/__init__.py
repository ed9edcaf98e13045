"""Mixers: combine the agents' values into the value of the joint action."""

from __future__ import annotations

from omagd.utils.registry import Registry

REGISTRY: Registry[type] = Registry(
    "mixer",
    "omagd.mixers",
    lazy={
        "qmix": "omagd.modules.mixers.mixer:QMixer",
        "set_qmix": "omagd.modules.mixers.set_qmix:SetQMixer",
        "qplex": "omagd.modules.mixers.qplex:QPLEXMixer",
        "qatten": "omagd.modules.mixers.qatten:QattenMixer",
        "vdn": "omagd.modules.mixers.mixer:VDNMixer",
        "none": "omagd.modules.mixers.mixer:NoMixer",
    },
    protocol="omagd.modules.mixers.mixer:protocol_of",
)
