"""What agents read beside what they see: what others see (`use_team_obs`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from q_toys import INFO, SMALL

import omagd
from omagd.config.loading import resolve
from omagd.envs.factory import make_env
from omagd.envs.protocol import random_actions
from omagd.modules.graph_reconstructers.graphs import TeamView, obs_to_nodes
from omagd.run.cli.preflight import preflight
from omagd.utils.errors import UserError

CPU = torch.device("cpu")


def moments(name: str, map_name: str, steps: int) -> tuple[list[np.ndarray], list[np.ndarray], object]:
    """Return obs and full_obs of random play, and the facts."""
    env, rng = make_env(name, {"map_name": map_name}, 4, processes=False), np.random.default_rng(2)
    everyone = np.ones(4, bool)
    env.reset(everyone, np.arange(4))
    own, full = [], []
    for step in range(steps):
        seen = env.observe(full=True)
        own.append(seen.obs.copy())
        full.append(seen.full_obs.copy())
        result = env.step(random_actions(seen.avail_actions, rng), everyone)
        if result.terminated.any():
            env.reset(result.terminated, np.arange(4) + 4 * step)
    info = env.info
    env.close()
    return own, full, info


@pytest.mark.parametrize("map_name", ["3s_vs_5z", "2s3z"])
def test_agents_read_every_unit_that_a_living_ally_sees_and_no_other(map_name):
    own, full, info = moments("skirmish", map_name, 60)
    obs, everything = np.concatenate(own), np.concatenate(full)
    got = TeamView(info.layout, info.n_agents, CPU)(torch.from_numpy(obs), torch.from_numpy(everything)).numpy()
    nodes, truth, read = (obs_to_nodes(torch.from_numpy(x), info.layout).numpy() for x in (obs, everything, got))
    n, filled, hidden = info.n_agents, 0, 0
    for row in range(len(obs)):
        units = [[i, *(a for a in range(n) if a != i), *range(n, n + info.layout.n_enemies)] for i in range(n)]
        living = [bool(obs[row, i].any()) for i in range(n)]
        known = {
            unit for i in range(n) if living[i] for unit, x in zip(units[i], nodes[row, i], strict=True) if x.any()
        }
        for i in range(n):
            if not living[i]:
                assert not got[row, i].any()
                continue
            for place, unit in enumerate(units[i]):
                seen = nodes[row, i, place].any()
                expected = nodes[row, i, place] if seen else truth[row, i, place] * (unit in known)
                assert np.array_equal(read[row, i, place], expected)
                filled += bool(not seen and unit in known and expected.any())
                hidden += bool(not seen and unit not in known and truth[row, i, place].any())
    assert filled > 50
    assert hidden > 50
    assert not np.array_equal(got, everything)


def test_the_dead_are_told_nothing():
    """Also where an environment's `full_obs` shows them something."""
    obs, full = torch.rand(5, 3, INFO.obs_dim) + 0.1, torch.rand(5, 3, INFO.obs_dim) + 0.1
    obs[:, 1] = 0
    read = TeamView(INFO.layout, 3, CPU)(obs, full)
    assert torch.equal(read, obs)


@pytest.mark.parametrize(("words", "message"), [
    ({"use_full_obs": True}, "use_team_obs=True: use_full_obs=True shows everything already"),
    ({"use_graph_reconstruction": True, "mac": "n_graph_mac"}, "use_team_obs=True: .*use_graph_reconstruction=False"),
    ({"runner": "resident"}, "runner=resident: .* not with use_team_obs=True. Use runner=parallel"),
])  # fmt: skip
def test_what_does_not_go_with_it_is_rejected(words, message):
    with pytest.raises(UserError, match=message):
        preflight(resolve("qmix", "skirmish", {"use_team_obs": True, "learner": "nq_graph_learner", **words}))


@pytest.mark.processes
def test_a_trained_team_plays_on_what_it_tells_one_another(tmp_path: Path):
    values = {**SMALL, "use_team_obs": True, "t_max": 60, "batch_size_run": 2, "batch_size": 2, "test_nepisode": 2}
    summary = omagd.run(
        resolve("qmix", "skirmish", {**values, "env_args.map_name": "3m", "local_results_path": str(tmp_path)})
    )
    policy, env = omagd.load_policy(summary["folder"]), omagd.make("skirmish", map_name="3m")
    assert omagd.play(policy, env, episodes=2)["totals"]["episodes"] == 2
    obs, mask = np.zeros((3, env.info.obs_dim)), np.ones((3, env.info.n_actions), bool)
    with pytest.raises(ValueError, match="use_team_obs=True"):
        policy.act(obs, mask)
    env.close()
