"""Mixers: combine the agents' values into the value of the joint action."""

from __future__ import annotations

from omagd.utils.registry import Registry

REGISTRY: Registry[type] = Registry(
    "mixer",
    "omagd.mixers",
    lazy={
        "qmix": "omagd.modules.mixers.qmix:QMixer",
        "set_qmix": "omagd.modules.mixers.set_qmix:SetQMixer",
        "vdn": "omagd.modules.mixers.vdn:VDNMixer",
        "none": "omagd.modules.mixers.vdn:NoMixer",
    },
    protocol="omagd.modules.mixers.mixer:protocol_of",
)
