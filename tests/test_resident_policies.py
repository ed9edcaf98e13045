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

torch.set_num_threads(1)
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
    """Where episodes wait changes nothing, and their log-probabilities are those of the agent that played them."""
    found = []
    for in_main_memory in (True, False):
        config = config_of(preset, buffer_cpu_only=in_main_memory)
        preflight(config)
        stage = stage_of(config, tmp_path / f"{in_main_memory}")
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
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
