"""The study files that are shipped: arms differ in what agents and losses read, and how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from omagd.lab.studies.spec import config_of_words, load

FILES = sorted((Path(__file__).resolve().parents[1] / "studies").glob("*.yaml"))
READS = {
    "name", "use_full_obs", "use_team_obs", "use_graph_reconstruction", "agent", "learner", "belief_loss",
    "belief_weight", "belief_units", "belief_every", "updates_per_iteration", "t_max",
}  # fmt: skip
OF_PREDICTORS = ("graph_", "tokenizer_config", "mask_predictor_config")


def by_environment(file):
    """Return the arms; comparators join the arms of the study that they belong to. PPO has settings of its own."""
    found = {}
    for each in (file.with_stem("belief_head"), file) if file.stem == "belief_comparators" else (file,):
        for job in load(each).jobs:
            found.setdefault((job.env, job.map, job.seed), {})[job.arm] = config_of_words(job.words)
    return {place: {arm: arms[arm] for arm in arms if arm != "mappo"} for place, arms in found.items()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_arms_differ_only_in_what_agents_and_losses_read_and_how_long(file):
    for arms in by_environment(file).values():
        first = arms.get("baseline", next(iter(arms.values()))).model_dump()
        for config in arms.values():
            values = config.model_dump()
            differing = {key for key in values if values[key] != first[key] and not key.startswith(OF_PREDICTORS)}
            assert differing <= READS, differing
            assert config.t_max % config.test_interval == 0  # else the last test is not that of the trained team
        assert {arm: config.use_full_obs for arm, config in arms.items()} == {
            arm: arm.startswith("full_obs") for arm in arms
        }


def test_arms_of_a_map_learn_as_long_and_their_last_test_has_many_battles():
    for file in FILES:
        jobs = load(file).jobs
        configs = [config_of_words(job.words) for job in jobs]
        assert all(config.test_nepisode >= 512 or config.pretrain_only for config in configs)
        steps = {(job.env, job.map, config.t_max) for job, config in zip(jobs, configs, strict=True)}
        at_equal_time = file.stem.startswith("belief_")  # there quicker arms go on for more steps
        assert at_equal_time or len(steps) == len({(job.env, job.map) for job in jobs})
