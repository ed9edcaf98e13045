"""Training episodes that show all units in place of guesses (`truth_until`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_toys import noting
from q_toys import SMALL

import omagd
from omagd.config.loading import resolve
from omagd.controllers.types import Exploration
from omagd.envs.factory import make_env
from omagd.modules.graph_reconstructers.graphs import alive, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.last_sight import LastSight
from omagd.run.checkpoint.set_aside import whole_state
from omagd.run.cli.preflight import preflight
from omagd.run.training.build import PretrainedModules, build_mac, new_predictor, new_tokenizer
from omagd.runners import REGISTRY as RUNNERS
from omagd.runners.starts import EpisodeSeeds
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
CPU, MAP = torch.device("cpu"), "3m_mixed_sight6"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "zeros": ("fog_baseline", {"fill_unseen": "zeros"}),
    "last seen": ("fog_last_seen", {}),
    "masked": ("omagd_small", {}),
    "map constant": ("fog_map_constant", {}),
    "tracker": ("omagd_tracker", {}),
    "graphs": ("omagd_small", {"mac": "gnn_graph_mac", "agent": "gnn_rnn", "gnn_hidden_dim": 8}),
}


def controller(way: str, runner: str = "parallel") -> tuple[Any, Any, Any]:
    """Return a controller with untrained modules, its configuration and its environment."""
    preset, changes = WAYS[way]
    own = {"env_args.map_name": MAP, "batch_size_run": 4, "rnn_hidden_dim": 8, "runner": runner}
    config = resolve(preset, "skirmish", {**own, "truth_until": 0.5, **changes})
    env, modules = make_env("skirmish", {"map_name": MAP}, 4, processes=False), PretrainedModules()
    if config.use_graph_reconstruction:
        kind = config.mask_predictor_config.kind
        tokenizer = new_tokenizer(config, env.info, CPU) if kind == "masked" else None
        modules = PretrainedModules(tokenizer, new_predictor(config, env.info, CPU))
        if tokenizer is not None:
            modules.predictor.bind(tokenizer.table())
    return build_mac(config, env.info, CPU, modules), config, env


def rows_of(inputs: Any) -> set[bytes]:
    """Return all that agents read, row by row."""
    parts = [part for part in (inputs.features, inputs.guessed) if part is not None]
    return {b"".join(part[row].numpy().tobytes() for part in parts) for row in range(len(inputs.features))}


def played(way: str, runner: str, truth: float) -> tuple[Any, Any, set[bytes]]:
    """Return a controller, a batch of episodes that it has played, and what its agents acted on, row by row."""
    mac, config, env = controller(way, runner)
    acted = noting(mac, rows_of)
    plays, episodes = RUNNERS.get(runner)(env, config, env.info, EpisodeSeeds(1, "train")), []
    explore = Exploration(1.0, np.random.default_rng(3), truth)
    while len(episodes) < 12:
        episodes += plays.collect(mac, explore=explore, full_obs=True).episodes
    env.close()
    return mac, pack_episodes(episodes), acted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("runner", ["parallel", "stream"])
@pytest.mark.parametrize("truth", [0.0, 0.5, 1.0])
def test_an_episode_shows_all_units_or_none_and_learners_read_the_same_bits(
    way: str, runner: str, truth: float
) -> None:
    mac, batch, acted = played(way, runner, truth)
    layout, inputs = mac.info.layout, mac.inputs(batch)
    assert rows_of(inputs) <= acted
    own, full = (obs_to_nodes(batch[name], layout) for name in ("obs", "full_obs"))
    living = alive(batch["obs"])[..., None]
    missing, kinds = unseen(own) & living, []
    read = obs_to_nodes(inputs.features, layout)
    assert torch.equal(torch.where(missing[..., None], 0.0, read), torch.where(missing[..., None], 0.0, own))
    assert torch.equal(inputs.guessed & batch.valid_mask[:, None, None], missing & batch.valid_mask[:, None, None])
    for episode in range(batch.packing.n_episodes):
        rows = batch.packing.episode == episode
        there = missing[rows] & (full[rows] != 0).any(-1)
        if int(there.sum()) < 5:
            continue
        shown = torch.equal(read[rows][missing[rows]], full[rows][missing[rows]].half().float())
        kinds.append(shown)
    assert set(kinds) == {0.0: {False}, 0.5: {True, False}, 1.0: {True}}[truth]


def test_tests_show_nothing_also_after_training_that_did() -> None:
    mac, config, env = controller("last seen")
    plays = RUNNERS.get("parallel")(env, config, env.info, EpisodeSeeds(1, "train"))
    plays.collect(mac, explore=Exploration(1.0, np.random.default_rng(3), 1.0), full_obs=True)
    greedy = plays.run(mac, explore=None, full_obs=True).episodes
    env.close()
    batch = pack_episodes(greedy)
    assert torch.equal(batch["recon"].float(), again(mac, batch))


def again(mac: Any, batch: Any) -> torch.Tensor:
    """Return the fills [S, n, obs_dim] of a batch of episodes by a memory of last sights that is played once more."""
    memory, out = LastSight(mac.info, CPU), torch.zeros_like(batch["recon"]).float()
    for episode in range(batch.packing.n_episodes):
        memory.begin(1)
        for step, row in enumerate((batch.packing.episode == episode).nonzero().flatten().tolist()):
            out[row] = memory.step(batch["obs"][row][None], np.array([step])).fields["recon"][0].float()
    return out


def test_which_episodes_show_all_is_part_of_a_controllers_snapshot() -> None:
    mac, config, env = controller("last seen")
    plays = RUNNERS.get("parallel")(env, config, env.info, EpisodeSeeds(1, "train"))
    plays.collect(mac, explore=Exploration(1.0, np.random.default_rng(3), 1.0), full_obs=True)
    env.close()
    other = controller("last seen")[0]
    other.begin(4)
    other.load_snapshot(mac.snapshot())
    assert other._shown.all() and mac._shown.all()
    snapshot = mac.snapshot()
    del snapshot["shown"]  # as an earlier version saved it
    other.load_snapshot(snapshot)
    assert not other._shown.any()


@pytest.mark.processes
def test_training_shows_all_units_in_all_episodes_then_in_ever_fewer(tmp_path: Path, monkeypatch: Any) -> None:
    from omagd.run.training.stages import rl

    shares: list[tuple[int, float]] = []
    found = rl.RLStage._exploration

    def noted(self: Any) -> Exploration:
        explore = found(self)
        shares.append((self.clock.t_env, explore.truth))
        return explore

    monkeypatch.setattr(rl.RLStage, "_exploration", noted)
    values = {**SMALL, "run": "default", "t_max": 300, "batch_size_run": 2, "batch_size": 2, "test_nepisode": 2,
              "test_interval": 10**6, "env_args.map_name": MAP, "truth_all_until": 0.2, "truth_until": 0.6,
              "local_results_path": str(tmp_path)}  # fmt: skip
    summary = omagd.run(resolve("fog_last_seen", "skirmish", values))
    wanted = [1.0 if t < 60 else max(0.0, (180 - t) / 120) for t, _ in shares]
    assert [share for _, share in shares] == pytest.approx(wanted)
    assert shares[0] == (0, 1.0) and shares[-1][1] == 0.0 and any(0 < share < 1 for _, share in shares)
    card = json.loads((Path(summary["folder"]) / "card.json").read_text())
    assert card["recorded"]["settings"]["truth_until"] == 0.6


@pytest.mark.parametrize(("preset", "changes", "message"), [
    ("fog_baseline", {}, "truth_until=0.5: shows all units in place of guesses, and nothing is guessed"),
    ("fog_full_obs", {}, "nothing is guessed"),
    ("omagd_small", {"mask_predictor_config.decode": "argmax"}, "argmax stores codes.* decode=mean, or truth_until=0"),
    ("fog_ma2e", {}, "kind=ma2e: fills in no units, so truth_until=0.5 shows none. Use truth_until=0"),
    ("omagd_tracker", {"truth_all_until": 0.6}, "truth_all_until=0.6: must be at most truth_until=0.5"),
    ("omagd_tracker", {"truth_all_until": 1.0, "truth_until": 1.0}, "truth_all_until=1.0: .* Give less than 1"),
    ("fog_baseline", {"fill_unseen": "zeros", "use_full_obs": True}, "fill_unseen=zeros: use_full_obs=True"),
])  # fmt: skip
def test_what_does_not_go_with_it_is_rejected(preset: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        preflight(resolve(preset, "skirmish", {"truth_until": 0.5, **changes}))


@pytest.mark.parametrize(
    "words", [{"pretrain_only": True}, {"reconstructer_stage": "stage2"}, {"truth_until": 0.0}], ids=str
)
def test_a_preset_that_shows_the_truth_also_trains_its_predictor_alone(words: dict[str, Any]) -> None:
    config = resolve("omagd_tracker", "skirmish", {"env_args.map_name": MAP, **words})
    assert preflight(config) is not None or config.truth_share(0.0) in (0.0, 1.0)
    assert config.truth_until or config.truth_share(0.0) == 0.0


@pytest.mark.processes
def test_a_state_whose_replay_holds_no_truth_cannot_go_on_with_it(tmp_path: Path) -> None:
    values = {**SMALL, "run": "default", "t_max": 60, "batch_size_run": 2, "batch_size": 2, "test_nepisode": 2,
              "test_interval": 10**6, "env_args.map_name": MAP, "local_results_path": str(tmp_path)}  # fmt: skip
    first = omagd.run(resolve("fog_last_seen", "skirmish", {**values, "truth_until": 0.9, "keep_checkpoints": True}))
    lines = [json.loads(line) for line in (Path(first["folder"]) / "metrics.jsonl").read_text().splitlines()]
    assert any(0 < line["truth"] <= 1 for line in lines if "truth" in line)
    given = {**values, "t_max": 200, "checkpoint_path": f"{first['folder']}/checkpoints"}
    with pytest.raises(UserError, match="a state with truth_until=0.9, not 0.0"):
        whole_state(resolve("fog_last_seen", "skirmish", given), id)
    same = resolve("fog_last_seen", "skirmish", {**given, "truth_until": 0.9})
    assert whole_state(same.model_copy(update={"fill_unseen": "zeros"}), id) is not None
    for key, value in {"fill_unseen": "none", "use_full_obs": True, "use_team_obs": True}.items():
        with pytest.raises(UserError, match=f"a state with {key}={getattr(same, key)}, not {value}"):
            whole_state(same.model_copy(update={key: value}), id)
