"""Action selectors: from values of all actions to one available action for each agent."""

from __future__ import annotations

from omagd.utils.registry import Registry

REGISTRY: Registry[type] = Registry(
    "action_selector",
    "omagd.action_selectors",
    lazy={
        "epsilon_greedy": "omagd.components.action_selectors.selectors:EpsilonGreedy",
        "greedy": "omagd.components.action_selectors.selectors:Greedy",
    },
)
