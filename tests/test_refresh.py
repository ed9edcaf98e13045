"""Refreshing the predictor in stage 3: over ranks, in the agents' reconstructions, in files, and what is rejected."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_budgets import BUDGETS
from ddp_harness import run_ranks
from graph_toys import INFO, toy_config, toy_episodes, toy_modules
from run_equality import leaves

import omagd
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.checks import refresh_warnings
from omagd.lab.commands import beliefs
from omagd.learners import PREDICTORS
from omagd.learners.synced_optimizer import SKIPPED
from omagd.modules.graph_reconstructers import REGISTRY
from omagd.run.checkpoint.set_aside import whole_state
from omagd.run.checkpoint.weights import PREDICTOR_FILE, keep_file, load_file
from omagd.run.cli.main import config_from
from omagd.run.cli.preflight import preflight
from omagd.run.training import refresh
from omagd.run.training.build import of_checkpoint
from omagd.run.training.evaluate import evaluation_config, trained_team
from omagd.run.training.refresh import Refresh
from omagd.run.training.session import Session
from omagd.run.training.stages.base import PretrainedModules
from omagd.run.training.stages.rl import RLStage
from omagd.runners.stream_runner import StreamRunner
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.logging import Logger, setup_logging
from omagd.utils.packing import Episode
from omagd.utils.run_folder import RunFolder
from omagd.utils.seeding import generator

torch.set_num_threads(1)
KINDS = [name for name in PREDICTORS.names() if not hasattr(PREDICTORS.get(name), "most_updates")]
UPDATES = {"reconstructor_refresh": 50, "reconstructor_refresh_updates": 3}
STAGES = (
    "--config=omagd_small", "--env-config=skirmish", "with", "env_args.map_name=3m_mixed_sight6", *BUDGETS,
    "run=default", "t_max=600", "test_interval=100", "save_model_interval=100", "buffer_size=12",
    "graph_pretrain_eval_episodes=2", "graph_pretrain_test_episodes=2", "reconstructor_refresh=60",
    "reconstructor_refresh_updates=2", "graph_lr=0.01", "truth_until=0",
)  # fmt: skip


def refresh_of(
    kind: str,
    episodes: list[Episode],
    folder: Path,
    dist: Dist | None = None,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> tuple[Refresh, Any]:
    """Return a refresh over toy modules and the reconstructor that it serves."""
    updates = {**UPDATES, "graph_pretrain_eval_episodes": 4, "graph_lr": 0.05, "mask_ratio": 0.0, **more}
    config = toy_config(kind=kind, **updates)
    tokenizer, predictor = toy_modules(config, dtype)
    reconstructor = REGISTRY.get(kind)(tokenizer, predictor, config, INFO)
    buffer = EpisodeBuffer(len(episodes))
    buffer.add(episodes)
    logger = Logger(setup_logging(None, rank=1), minimal=True)
    session: Any = SimpleNamespace(config=config, info=INFO, dist=dist or Dist(), folder=RunFolder(folder))
    session.logger, session.env = logger, SimpleNamespace(n_slots=1)
    session.rounds = partial(Session.rounds, session)
    made = Refresh(
        session, PretrainedModules(tokenizer, predictor), SimpleNamespace(reconstructor=reconstructor), buffer
    )
    made.prepare()
    return made, reconstructor


def play(reconstructor: Any, episodes: list[Episode]) -> dict[str, torch.Tensor]:
    """Return what an agent has stored and received in all steps of the episodes, played one after another."""
    rows = []
    reconstructor.begin(1)
    for episode in episodes:
        reconstructor.reset([True])
        for t, obs in enumerate(episode["obs"]):
            last = episode["actions"][t - 1] if t else torch.full((INFO.n_agents,), -1)
            made = reconstructor.step(obs[None], torch.tensor([t]), None, last[None])
            rows.append((made.obs[0], made.fields[reconstructor.field][0], obs))
    acted, stored, seen = (torch.stack(values) for values in zip(*rows, strict=True))
    return {"acted": acted, reconstructor.field: stored, "obs": seen}


def of_rank(rank: int, dist: Dist, place: str) -> dict[str, Any]:
    """Return for each kind the state after two refreshes on the episodes of this rank, and what was logged."""
    out = {}
    for kind in KINDS:
        made, reconstructor = refresh_of(kind, episodes_of(rank), Path(place), dist, torch.float64)
        rng = generator(0, "refresh", rank)
        logged = [made.run(rng, "test") for _ in range(2)]
        out[kind] = made.state_dict(), reconstructor.predictor.state_dict(), logged
    return out


def episodes_of(*ranks: int) -> list[Episode]:
    """Return the replay of ranks: five episodes to learn from, and the newest two, of each."""
    parts = [toy_episodes(7, seed=10 + rank, apart=True) for rank in ranks]
    return [episode for part in parts for episode in part[:5]] + [episode for part in parts for episode in part[5:]]


@pytest.mark.processes
def test_ranks_refresh_as_one_process_with_all_their_episodes(tmp_path: Path) -> None:
    ranks = run_ranks(of_rank, str(tmp_path), world_size=2)
    for kind in KINDS:
        (state, acting, logged), other = (found[kind] for found in ranks)
        assert dict(leaves([state, acting, logged])) == dict(leaves(list(other)))
        made, _ = refresh_of(kind, episodes_of(0, 1), tmp_path, dtype=torch.float64)
        rng = generator(1, "another order")
        alone = [made.run(rng, "test") for _ in range(2)]
        for name, value in made.predictor.state_dict().items():
            torch.testing.assert_close(acting[name], value, atol=1e-7, rtol=1e-6, msg=f"{kind} {name}")
        assert logged == [pytest.approx(line, rel=1e-5, abs=1e-6) for line in alone]


@pytest.mark.parametrize("kind", KINDS)
def test_agents_act_with_new_weights_and_learn_from_what_they_received(kind: str, tmp_path: Path) -> None:
    episodes = toy_episodes(9, seed=4, apart=True)
    made, reconstructor = refresh_of(kind, episodes, tmp_path)
    given = copy.deepcopy(made.modules().predictor)
    before = play(reconstructor, episodes)
    logged = made.run(generator(0, "refresh"), "test")
    after = play(reconstructor, episodes)
    fresh = REGISTRY.get(kind)(made._pretrained.tokenizer, copy.deepcopy(made.predictor), made.session.config, INFO)
    wanted = play(fresh, episodes)
    assert all(torch.equal(after[name], wanted[name]) for name in after)
    assert not torch.equal(before[reconstructor.field], after[reconstructor.field])
    assert torch.equal(reconstructor.restore(before)[0], before["acted"]), "stored values stay as they were received"
    assert made.modules().predictor is made.predictor and made.predictor is not reconstructor.predictor
    kept = made._pretrained.predictor.state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in given.state_dict().items()), "stage 2's result stays"
    assert logged["refresh/train_graph_loss"] > 0
    total, count = made.learner.evaluate(made._batch(range(5, 9)))[name := made.learner.best_metric]
    assert total / count == pytest.approx(logged[f"refresh/{name}"])


@pytest.mark.parametrize(("n", "learned", "newest"), [
    (9, range(5), range(5, 9)), (5, range(3), range(3, 5)), (2, [0], [1]), (1, [0], [0]),
])  # fmt: skip
def test_the_newest_episodes_are_measured_and_not_learned_from(
    n: int, learned: Any, newest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last four, `graph_pretrain_eval_episodes`; of few episodes half; the only one serves for both."""
    made, _ = refresh_of("tracker", toy_episodes(n, seed=4), tmp_path)
    used: list[tuple[str, list[int]]] = []

    def noting(name: str) -> Any:
        return lambda indices: used.append((name, sorted(indices))) or {}

    monkey: Any = made
    monkey._batch = list
    monkeypatch.setattr(refresh, "TOGETHER", 3)
    monkey.learner = SimpleNamespace(**{name: noting(name) for name in ("evaluate", "update", "calibrate")})
    monkey.learner.begin = lambda batches: used.append(("begin", sum(batches(), [])))
    made.run(generator(0, "refresh"), "test")
    measured, learning = list(newest), ("update", list(learned))
    wanted = [("evaluate", measured), ("begin", list(learned)), *[learning] * 3, ("calibrate", [measured])]
    assert used == [*wanted, ("evaluate", measured)]


def test_whole_rounds_of_all_slots_are_measured(tmp_path: Path) -> None:
    made, _ = refresh_of("tracker", toy_episodes(14, seed=4), tmp_path)
    made.session.env.n_slots = 3
    made.run(generator(0, "refresh"), "test")
    used: list[list[int]] = []
    monkey: Any = made
    monkey._batch = lambda indices: used.append(sorted(indices)) or Refresh._batch(made, indices)
    made.run(generator(0, "refresh"), "test")
    assert used[0] == list(range(8, 14)), "four episodes take two rounds of three slots"
    assert all(each == list(range(8)) for each in used[1:])


def test_each_refresh_begins_with_the_whole_learning_rate_and_says_what_it_has_gained(tmp_path: Path) -> None:
    made, _ = refresh_of("tracker", toy_episodes(9, seed=4, apart=True), tmp_path)
    newest, rates, update = made._batch(range(5, 9)), [], made.learner.update

    def noting(batch: Any) -> Any:
        stats = update(batch)
        rates.append(made.learner.optimizer.param_groups[0]["lr"])
        return stats

    made.learner.update = noting
    for _ in range(2):
        total, count = made.learner.evaluate(newest)["error_all"]
        logged = made.run(generator(0, "refresh"), "test")
        assert logged["refresh/error_all_before"] == pytest.approx(float(total / count))
        assert logged["refresh/error_all"] != logged["refresh/error_all_before"]
    assert rates == pytest.approx([0.05, 0.05 * 0.75, 0.05 * 0.25] * 2)  # half a cosine over the updates of one refresh


def test_a_resumed_run_refreshes_when_it_would_have(tmp_path: Path) -> None:
    made, _ = refresh_of("tracker", toy_episodes(3, seed=4), tmp_path)
    assert made.due(60, 600)  # the next one is due when 50 more steps have been made
    for _ in range(4):  # of the ten in a row that end a run
        made._health.note({SKIPPED: (torch.ones(()), torch.ones(()))})
    state = copy.deepcopy(made.state_dict())
    other, _ = refresh_of("tracker", toy_episodes(3, seed=4), tmp_path)
    other.load_state_dict(state)
    assert dict(leaves(other.state_dict())) == dict(leaves(made.state_dict()))
    assert other._health.record() == {SKIPPED: 4.0}
    assert [each.due(90, 600) for each in (made, other)] == [False, False]
    assert [each.due(120, 600) for each in (made, other)] == [True, True]


def test_a_share_of_the_stage_is_its_steps_wherever_the_stage_ends(tmp_path: Path) -> None:
    """An end that moves, as an estimate does, moves the next refresh and brings none at once."""
    episodes = toy_episodes(3, seed=4)
    given: list[dict[str, Any]] = [
        {"reconstructor_refresh": 50}, {"reconstructor_refresh": 0.125},
        {"reconstructor_refresh": 0.125, "max_episodes": 100},
    ]  # fmt: skip
    steps, share, moving = (refresh_of("tracker", episodes, tmp_path, **each)[0] for each in given)
    times = range(7, 400, 9)
    assert [share.due(t, 400) for t in times] == [steps.due(t, 400) for t in times]
    rounded, _ = refresh_of("tracker", episodes, tmp_path, reconstructor_refresh=0.29)
    assert [rounded.due(t, 100) for t in (28, 29)] == [False, True], "to whole steps"
    for each in (steps, share):
        each.load(tmp_path, 140)
        assert [each.due(t, 400) for t in (149, 150, 199, 200)] == [False, True, False, True]
    moving.load(tmp_path, 120)
    asked = [(140, 400), (150, 400), (165, 440), (190, 400), (200, 400), (299, 800), (300, 800)]
    assert [moving.due(*each) for each in asked] == [False, True, False, False, True, False, True]
    assert refresh_warnings(share.session.config) == []


def test_a_share_of_a_stage_that_episodes_end_refreshes_as_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshed = []
    monkeypatch.setattr("omagd.run.reporting.plots.curves", lambda *_: None)
    monkeypatch.setattr(Refresh, "run", lambda self, *_: (refreshed.append(self), {})[1])
    words = [word for word in STAGES if not word.startswith(("t_max=", "reconstructor_refresh="))]
    more = ("mask_predictor_config.kind=tracker", "max_episodes=40", "reconstructor_refresh=0.25")
    result = omagd.run(config_from([*words, f"local_results_path={tmp_path}", *more]))
    assert result["exit_state"] == "completed"
    assert 2 <= len(refreshed) <= 4, "the end is an estimate"


def test_files_of_a_step_and_checkpoints_continue_weights_and_optimizer(tmp_path: Path) -> None:
    made, reconstructor = refresh_of("tracker", toy_episodes(9, seed=4), tmp_path)
    other, theirs = refresh_of("tracker", toy_episodes(9, seed=4), tmp_path)
    made.run(generator(0, "refresh"), "test")
    other.load(tmp_path, 70)
    assert not other.due(99, 600) and other.due(100, 600), "without a file the interval still begins at the step"
    made.save(tmp_path)
    other.load(tmp_path, 70)
    resumed, its = refresh_of("tracker", toy_episodes(9, seed=4), tmp_path)
    resumed.load_state_dict(copy.deepcopy(made.state_dict()))
    wanted = dict(leaves(made.predictor.state_dict()))
    for acting in (theirs, its):
        assert dict(leaves(acting.predictor.state_dict())) == wanted, "agents act with them at once"
    for one in (made, other, resumed):
        one.run(generator(1, "refresh"), "test")
    wanted = dict(leaves(made.predictor.state_dict()))
    for acting in (reconstructor, theirs, its):
        assert dict(leaves(acting.predictor.state_dict())) == wanted
    assert resumed.count == 2


@pytest.mark.parametrize("said", ["holds values that are not finite", "does not fit this learner"])
def test_an_optimizer_in_a_file_that_does_not_fit_is_one_line(said: str, tmp_path: Path) -> None:
    made, _ = refresh_of("tracker", toy_episodes(9, seed=4), tmp_path)
    made.run(generator(0, "refresh"), "test")
    made.save(tmp_path)
    content = load_file(tmp_path / PREDICTOR_FILE, "checkpoint_path")
    if said.startswith("holds"):
        content["learner"]["optimizer"]["state"][0]["exp_avg"].view(-1)[0] = float("nan")
    else:
        del content["learner"]["optimizer"]
    keep_file(tmp_path / PREDICTOR_FILE, content)
    with pytest.raises(UserError, match=f"^checkpoint_path=.*{PREDICTOR_FILE} {said}"):
        made.load(tmp_path, 70)


def test_weights_that_are_not_finite_reach_no_agent(tmp_path: Path) -> None:
    made, reconstructor = refresh_of("tracker", toy_episodes(9, seed=4), tmp_path)
    before = copy.deepcopy(reconstructor.predictor.state_dict())
    inner, measured = made.learner.calibrate, dict[str, float]()
    setattr(made, "_measured", lambda batch: measured)  # noqa: B010 where no episode shows it
    made.learner.calibrate = lambda batch: (inner(batch), made.predictor.head.bias.data.fill_(float("inf")))
    with pytest.raises(UserError, match=r"reconstructor_refresh in here: .*not finite.*smaller graph_lr"):
        made.run(generator(0, "refresh"), "here")
    assert dict(leaves(before)) == dict(leaves(reconstructor.predictor.state_dict()))


def test_a_refresh_whose_loss_is_not_finite_or_whose_updates_are_skipped_reaches_no_agent(tmp_path: Path) -> None:
    made, reconstructor = refresh_of("tracker", toy_episodes(9, seed=4), tmp_path, reconstructor_refresh_updates=10)
    before = copy.deepcopy(reconstructor.predictor.state_dict())
    measured, inner = made._measured, made.learner.update
    setattr(made, "_measured", lambda batch: {"graph_loss": float("nan")})  # noqa: B010
    with pytest.raises(UserError, match=r"reconstructor_refresh in here: refresh/graph_loss\S*=nan is not finite"):
        made.run(generator(0, "refresh"), "here")
    setattr(made, "_measured", measured)  # noqa: B010
    made.learner.update = lambda batch: {**inner(batch), SKIPPED: (torch.ones(()), torch.ones(()))}
    with pytest.raises(UserError, match="in here: the gradient was not finite in 10 updates in a row"):
        made.run(generator(0, "refresh"), "here")
    assert dict(leaves(before)) == dict(leaves(reconstructor.predictor.state_dict()))


def test_an_interval_of_the_whole_run_is_named() -> None:
    shorter, whole = (toy_config(kind="tracker", **UPDATES, t_max=t_max) for t_max in (51, 50))
    (warning,) = refresh_warnings(whole)
    assert warning.startswith("reconstructor_refresh=50: t_max=50 ends the run before the first refresh. Give less")
    assert refresh_warnings(shorter) == refresh_warnings(toy_config(t_max=50)) == []
    assert refresh_warnings(whole.model_copy(update={"evaluate": True})) == []


@pytest.mark.parametrize(
    ("runner", "kind", "truth"), [
        ("parallel", "masked", 0.0), ("stream", "tracker", 0.0), ("parallel", "tracker", 0.5),
        ("resident", "masked", 0.5),
    ],
)  # fmt: skip
def test_a_run_refreshes_between_episodes_and_saves_what_its_agents_act_with(
    runner: str, kind: str, truth: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omagd.run.reporting.plots.curves", lambda *_: None)
    stages, ended = [], []
    inner, drain = Refresh.run, StreamRunner.drain

    def watched(self: Refresh, *args: Any) -> dict[str, float]:
        train = self.session.runners["train"]
        assert not train.in_flight, "no episode is played with two predictors"
        episodes = self._replay.episodes
        assert all(episode["full_obs"].any() for episode in episodes)
        before = [episode["recon"].clone() for episode in episodes]
        values = inner(self, *args)
        assert all(map(torch.equal, before, (episode["recon"] for episode in self._replay.episodes)))
        stages.append(self)
        return values

    monkeypatch.setattr(Refresh, "run", watched)
    monkeypatch.setattr(StreamRunner, "drain", lambda *args, **more: (ended.append(1), drain(*args, **more))[1])
    words = (
        f"local_results_path={tmp_path}",
        f"runner={runner}",
        f"mask_predictor_config.kind={kind}",
        f"truth_all_until={truth}",
        f"truth_until={truth}",
    )
    result = omagd.run(config_from([*STAGES, *words]))
    folder = RunFolder(Path(result["folder"]))
    lines = [json.loads(line) for line in folder.metrics_jsonl.read_text().splitlines()]
    logged = [line for line in lines if "refresh/count" in line]
    assert [line["refresh/count"] for line in logged] == list(range(1, len(stages) + 1)) and len(stages) >= 2
    first = max(60, truth * 600)  # while the truth is shown, nobody acts with the predictor
    assert all(first <= line["t_env"] < 600 for line in logged), "never at the end"
    assert all(line["refresh/error_before"] > 0 and "refresh/error" in line for line in logged)
    assert bool(ended) == (runner == "stream")
    files = [folder.pretrained("stage2", best=True), *(folder.step(t) for t in folder.saved_steps())]
    weights = [torch.load(path / "stage2_model.th", weights_only=True)["weights"] for path in files]
    values = [dict(leaves(each)) for each in weights]
    assert len(values) >= 3 and values[0] != values[-1]
    assert dict(leaves(dict(stages[-1]._acting.state_dict()))) == values[-1]
    config = config_from([*STAGES, *words, f"pretrained_mask_predictor_path={files[0]}"])
    own = config.model_copy(update={"pretrained_mask_predictor_path": ""})
    found = [of_checkpoint(each, files[-1]).pretrained_mask_predictor_path for each in (own, config)]
    assert found == [str(files[-1]), str(files[0])], "the step's own, unless another one is given"
    team: Any = trained_team(
        str(folder.path), "graph_pretrain_policy_path", stages[-1].session.info, torch.device("cpu")
    )
    assert dict(leaves(dict(team.reconstructor.predictor.state_dict()))) == values[-1]
    contents = [torch.load(path / "stage2_model.th", weights_only=True)["baselines"] for path in (files[0], files[-1])]
    assert dict(leaves(contents[0])) == dict(leaves(contents[1])), "beside which later evaluations judge"
    players: Any = SimpleNamespace(info=stages[-1].session.info)
    assert dict(leaves(dict(beliefs._reconstructor(players, str(folder.path)).predictor.state_dict()))) == values[-1]
    resident = evaluation_config(str(folder.path), {"runner": "resident"})
    with pytest.raises(UserError, match=f"kind=masked, not kind={kind}") if kind != "masked" else nullcontext():
        assert preflight(resident).stages == ("evaluate",)
    if kind == "tracker":
        sizes = {"mask_predictor_config": config.mask_predictor_config.model_copy(update={"d_model": 32})}
        with pytest.raises(UserError, match=r"checkpoint_path=.*stage2_model.th was trained with .*d_model=16, not 32"):
            preflight(own.model_copy(update={"checkpoint_path": str(folder.models), "t_max": 10**6, **sizes}))
    without = own.model_copy(update={"checkpoint_path": str(folder.checkpoints), "reconstructor_refresh": 0})
    with pytest.raises(UserError, match="a state with reconstructor_refresh=60, not 0"):
        whole_state(without, id)


def test_a_run_that_ends_with_the_episodes_in_flight_is_tested_and_not_refreshed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omagd.run.reporting.plots.curves", lambda *_: None)
    drained, refreshed, inner = [], [], RLStage._drain

    def drain(stage: RLStage) -> None:
        before = stage.clock.t_env
        inner(stage)
        drained.append((before, stage.clock.t_env))

    monkeypatch.setattr(RLStage, "_drain", drain)
    monkeypatch.setattr(Refresh, "run", lambda self, *_: (refreshed.append(drained[-1][1]), {})[1])
    words = (f"local_results_path={tmp_path}", "runner=stream", "mask_predictor_config.kind=tracker")
    result = omagd.run(config_from([*STAGES, *words, "test_interval=100000", "reconstructor_refresh=1"]))
    assert any(before < 600 <= after for before, after in drained), "the episodes in flight must be the last ones"
    folder = RunFolder(Path(result["folder"]))
    lines = [json.loads(line) for line in folder.metrics_jsonl.read_text().splitlines()]
    tested = [line["t_env"] for line in lines if "test_return_mean" in line]
    assert tested[-1] == max(folder.saved_steps()) >= 600
    assert all(t < 600 for t in refreshed) and refreshed


NO_REFRESH = {
    "use_graph_reconstruction=False": "has no predictor",
    "mask_predictor_config.kind=map_constant": "kind=map_constant is not trained by updates",
    "runner=ticks": "learns from whole episodes, not with runner=ticks",
    "learner=ppo_learner": "keeps none",
    "env_args.map_name=3m,4m": "learns one map, not a set",
}


@pytest.mark.parametrize("words", NO_REFRESH)
def test_what_cannot_refresh_is_rejected_in_one_line(words: str) -> None:
    with pytest.raises(UserError, match=NO_REFRESH[words]):
        preflight(config_from([*STAGES, *words.split()]))
