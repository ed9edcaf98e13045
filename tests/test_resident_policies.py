"""On-policy learners whose episodes are played, and wait, on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interruption import stage_of
from q_toys import SMALL

from omagd.components.action_selectors import LOG_PROB
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.learners.policy_learner import log_softmax
from omagd.run.cli.preflight import preflight

SIZES: dict[str, Any] = {
    **SMALL, "use_cuda": False, "runner": "resident", "batch_size_run": 4, "batch_size": 6, "torch_threads": 1,
    "env_args": {"map_name": "3m"}, "t_max": 1000,
}  # fmt: skip
PRESETS = {"mappo": {}, "ippo": {}, "hpn_mappo": {}, "pqn_vdn": {}}
PRESETS |= dict.fromkeys(("rloo", "hpn_rloo"), {"group_size": 2, "learner_args": {"score": "return"}})


def config_of(preset: str, **updates: Any) -> Config:
    """Return a small configuration of a preset on a device."""
    return resolve(preset, "skirmish", {**SIZES, **PRESETS[preset], **updates})


@pytest.mark.parametrize("preset", PRESETS)
def test_it_learns_from_what_a_device_has_played(preset, tmp_path):
    """Log-probabilities are those of the agent that played; updates of fixed shapes learn what packed ones do."""
    found = []
    for fixed in (False, True):
        config = config_of(preset, graph_updates=fixed)
        preflight(config)
        stage = stage_of(config, tmp_path / f"{fixed}")
        stage.collect()
        batch = stage.data.buffer.batch(range(len(stage.data.buffer)))
        assert batch.packing.n_episodes == 8
        if config.action_selector == "softmax":
            with torch.no_grad():
                logits = stage.mac.agent(stage.mac.inputs(batch), batch.packing)
            log_p = log_softmax(logits, batch["avail_actions"].bool()).gather(-1, batch["actions"].long().unsqueeze(-1))
            played = ~batch.packing.closing
            torch.testing.assert_close(batch[LOG_PROB][played], log_p.squeeze(-1)[played])
            assert (log_p[played] < -0.1).any()
        before = {name: value.clone() for name, value in stage.mac.agent.state_dict().items()}
        stage.update()
        weights = stage.mac.agent.state_dict()
        assert any(not torch.equal(weights[name], value) for name, value in before.items())
        found.append(weights)
        stage.session.close()
    torch.testing.assert_close(found[1], found[0], atol=1e-3, rtol=0)
