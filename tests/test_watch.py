"""Recordings of battles, and the page, GIF and video that show them."""

from __future__ import annotations

import gzip
import json
import logging
import re
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from browser import opened
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from omagd.components.action_selectors import log_softmax
from omagd.config.loading import resolve
from omagd.controllers.types import Decision
from omagd.envs.actions import random_actions
from omagd.envs.factory import make_env
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes, unseen
from omagd.run.cli.main import main
from omagd.run.reporting.log_sinks import make_logger
from omagd.run.watch import drawing
from omagd.run.watch.page import player_page, save_recording
from omagd.run.watch.recorder import Recorder
from omagd.run.watch.recording import Moment, Recording
from omagd.runners.runner import Runner
from omagd.runners.starts import EpisodeSeeds, TaskStarts
from omagd.utils.errors import UserError
from omagd.utils.logging import RunFacts


class Oracle:
    """A random policy whose reconstructions are the truth: a recorder must show each guess where the unit is."""

    wants_full_obs, field = False, "recon"

    def __init__(self, info, guesses=True, logits=False):
        self.info, self.outputs_logits, self.seen = info, logits, []
        self.reconstructor = self if guesses else None

    def begin(self, n_slots):
        self.rng = np.random.default_rng(5)

    def reset(self, which):
        pass

    def act(self, tick, explore):
        available = tick.observation.avail_actions
        values = self.rng.normal(size=available.shape).astype(np.float32)
        self.seen.append((tick.observation.obs.copy(), values))
        full = tick.observation.full_obs
        return Decision(random_actions(available, self.rng), {} if full is None else {"recon": full.copy()}, values)

    def restore(self, data):
        obs, full = (obs_to_nodes(data[name], self.info.layout) for name in ("obs", "recon"))
        living = (data["obs"] != 0).any(-1, keepdim=True)
        return data["recon"], unseen(obs) & ~unseen(full) & living


def play(name="skirmish", episodes=1, slots=2, processes=False, policy=Oracle, **env_args):
    """Return the recording of some episodes of an environment, its entries in the log, and the policy."""
    env = make_env(name, env_args, slots, processes=processes)
    try:
        made = policy(env.info)
        recorder = Recorder(made, env, env.info, "a <b>policy</b>", most=episodes)
        stream = (
            TaskStarts(3, "test", weights=[1.0] * len(env.info.tasks)) if env.info.tasks else EpisodeSeeds(3, "test")
        )
        runner = Runner(env, resolve("qmix", None, {}), env.info, stream)
        layout = env.info.layout is not None
        log = runner.run(recorder, explore=None, episodes_per_slot=episodes, full_obs=layout, keep=False).log
        recorder.take(log)
        return Recording(episodes=recorder.episodes), [entry for entry in log if entry["slot"] == 0], made
    finally:
        env.close()


@pytest.fixture(scope="module")
def battles() -> Recording:
    return play(episodes=2, map_name="5m_vs_6m")[0]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("skirmish", {"map_name": "MMM"}),
        ("skirmish", {"map_name": "3m,5m_vs_6m"}),
        ("snakes_3v3", {"obs": "entities", "sight": 4.0}),
        ("matrix_game", {}),
        pytest.param("smax", {"map_name": "3m", "max_steps": 30}, marks=pytest.mark.skipif(
            find_spec("jaxmarl") is None, reason="the extra [smax] is not installed")),
    ],
)  # fmt: skip
def test_a_recording_is_what_happens_when_its_actions_are_played_again(name, args):
    recording, log, _ = play(name, episodes=2, slots=1 if name == "smax" else 2, **args)
    assert [episode.length for episode in recording.episodes] == [entry["length"] for entry in log]
    for episode, entry in zip(recording.episodes, log, strict=True):
        assert (episode.seed, episode.results["return"]) == (entry["seed"], entry["return"])
        assert episode.map_name == entry.get("task", args.get("map_name", episode.map_name))
        again = make_env(name, {**args, **({"map_name": episode.map_name} if "map_name" in args else {})}, 1, False)
        again.reset(np.ones(1, bool), np.array([episode.seed]))
        for step, moment in enumerate(episode.moments):
            frame = again.frame(0).to_dict()
            assert {key: frame[key] for key in frame if key != "scene"} == {
                key: value for key, value in moment.model_dump().items() if key in frame
            }
            if step < episode.length:
                ended = again.step(np.array([moment.actions]), np.ones(1, bool)).terminated[0]
                assert ended == (step == episode.length - 1)
        again.close()


@pytest.mark.parametrize(
    ("name", "args"), [("skirmish", {"map_name": "5m_vs_6m"}), ("snakes_3v3", {"obs": "entities", "sight": 4.0})]
)
def test_guesses_are_where_the_units_are_and_have_their_numbers(name, args):
    recording, _, policy = play(name, **args)
    episode, places = recording.episodes[0], 0
    x0, y0, x1, y1 = episode.scene.bounds
    for moment in episode.moments:
        for agent, beliefs in enumerate(moment.beliefs):
            seen = {unit for unit in range(len(moment.x)) if int(moment.seen[agent] or "0", 16) >> unit & 1}
            living = {unit for unit, alive in enumerate(moment.alive) if alive}
            guessed = {belief[0] for belief in beliefs}
            assert not seen & guessed and (seen | guessed == living if moment.alive[agent] else not seen | guessed)
            for unit, x, y, health in beliefs:
                gap = np.array([x - moment.x[unit], y - moment.y[unit]])
                if episode.scene.torus:
                    gap -= np.round(gap / (x1 - x0, y1 - y0)) * (x1 - x0, y1 - y0)
                    assert health is None, "neither snakes nor beans have health"
                else:
                    assert health == pytest.approx(moment.health[unit] / episode.scene.health_max[unit], abs=0.006)
                np.testing.assert_allclose(gap, 0, atol=0.06)
                places += 1
    assert places > 20


def test_values_are_those_of_available_actions_and_logits_become_probabilities():
    recording, _, policy = play(map_name="3m", policy=lambda info: Oracle(info, guesses=False))
    first = recording.episodes[0].moments[0]
    shown = [[value for value in row if value is not None] for row in first.values]
    assert all(set(row) <= set(np.round(policy.seen[0][1][0, i].astype(float), 4)) for i, row in enumerate(shown))
    assert first.values[0][0] is None and first.beliefs == [] and recording.episodes[0].values == "Q-values"
    recording, _, policy = play(map_name="3m", policy=lambda info: Oracle(info, logits=True))
    row = recording.episodes[0].moments[0].values[0]
    mask = np.array([value is not None for value in row])
    expected = np.exp(log_softmax(policy.seen[0][1][0, :1].astype(float), mask[None]))[0]
    np.testing.assert_allclose([value or 0 for value in row], expected, atol=1e-4)
    assert recording.episodes[0].values == "probabilities"


def test_the_environment_is_not_changed_by_being_recorded():
    _, log, _ = play(episodes=3, map_name="3m")
    env = make_env("skirmish", {"map_name": "3m"}, 2, False)
    runner = Runner(env, resolve("qmix", None, {}), env.info, EpisodeSeeds(3, "test"))
    plain = runner.run(Oracle(env.info), explore=None, episodes_per_slot=3, full_obs=True, keep=False).log
    assert [entry for entry in plain if entry["slot"] == 0] == log


@pytest.mark.processes
def test_games_in_other_processes_show_their_units(sc2_game):
    recording, log, _ = play("sc2", slots=1, processes=True, map_name="3m")
    (episode,) = recording.episodes
    assert episode.length == log[0]["length"] and episode.scene.kinds == ("marine",) * 6
    lost = sum(not alive for alive in episode.moments[-1].alive[:3])
    assert lost == log[0]["dead_allies"] and episode.moments[0].health[0] == 45.0
    assert len({tuple(moment.x) for moment in episode.moments}) > 3


def test_a_file_is_read_as_it_was_written_and_a_wrong_one_is_one_line(battles, tmp_path, capsys):
    path = battles.write(tmp_path / "deep" / "a.json.gz")
    assert Recording.read(path).packed() == path.read_bytes() == battles.packed()
    values = json.loads(gzip.decompress(path.read_bytes()))
    short = json.loads(json.dumps(values))
    short["episodes"][0]["moments"][1]["x"].pop()
    fewer = json.loads(json.dumps(values))
    fewer["episodes"][0]["moments"][0]["actions"].pop()
    for name, content, words in (
        ("torn", path.read_bytes()[:-40], "is damaged"),
        ("text", b"not compressed", "is damaged"),
        ("other", gzip.compress(b'{"a": 1}'), "is no recording"),
        ("list", gzip.compress(b"[]"), "is no recording"),
        ("empty", gzip.compress(json.dumps({**values, "episodes": []}).encode()), "is no recording"),
        ("later", gzip.compress(json.dumps({**values, "version": 2}).encode()), "is of a later version"),
        ("short", gzip.compress(json.dumps(short).encode()), "is no recording"),
        ("fewer", gzip.compress(json.dumps(fewer).encode()), "is no recording"),
    ):
        wrong = tmp_path / f"{name}.json.gz"
        wrong.write_bytes(content)
        with pytest.raises(UserError, match=words):
            Recording.read(wrong)
        assert main(["watch", str(wrong)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and words in err
    assert not list(tmp_path.glob("*.html"))


def small_recording() -> dict:
    """A recording with everything that a scene can have: two agents, a medic, an opponent, a thing and a wall."""
    moment = {
        "x": [1.0, 2.0, 8.0, 5.0], "y": [1.0, 2.0, 8.0, 5.0], "alive": [True, True, True, False],
        "health": [1.0, 2.0, 0.0, 0.0], "shield": [3.0, 0.0, 0.0, 0.0], "targets": [-1, 0, 1, -1],
        "bodies": [[1.0, 1.0, 1.0, 2.0], [], [], []], "marked": [1], "score": [1.0, 2.0], "actions": [2, 0],
        "values": [[0.5, None, 1.0], [0.0, 0.0, 0.0]], "seen": ["7", "f"], "beliefs": [[[2, 7.0, 7.0, 0.5]], []],
    }  # fmt: skip
    scene = {
        "ids": ["a0", "a1", "e0", "b0"], "teams": [0, 0, 1, 2], "kinds": ["marine", "medic", "marine", "bean"],
        "team_names": ["agents", "enemies", "beans"], "actions": ["stop", "north"], "health_max": [2, 2, 2, 0],
        "shield_max": [4, 0, 0, 0], "heals": [False, True, False, False], "sight": [3, 0], "reach": [2, 0],
        "bounds": [0, 0, 10, 10], "walls": [[3, 3, 4, 5]], "score": "score",
    }  # fmt: skip
    first = {"env": "e", "map_name": "m", "seed": 1, "policy": "p", "values": "Q-values", "results": {}}
    return {"episodes": [{**first, "scene": scene, "moments": [moment, json.loads(json.dumps(moment))]}]}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("marked", [999]), ("marked", [-1]), ("marked", [3]), ("seen", ["zz", "0"]), ("seen", ["0x1", "0"]),
        ("seen", []), ("x", [1.7e308, 1.0, 1.0, 1.0]), ("y", [-1.7e308, 1.0, 1.0, 1.0]), ("x", [10**400, 1, 1, 1]),
        ("bodies", [[1.0], [], [], []]), ("bodies", [[1.0, 1e308], [], [], []]), ("health", []), ("shield", []),
        ("score", []), ("score", [1.0]), ("actions", [-9, 0]), ("beliefs", [[[4, 1.0, 1.0, None]], []]),
        ("beliefs", [[[2, 1e300, 1.0, None]], []]),
        ("scene.ids", ["a0", "a0", "e0", "b0"]), ("scene.ids", ["a0", "a1", "e0", "b" * 20_000]),
        ("scene.teams", [0, 0, 9, 2]), ("scene.teams", [0, 1, 0, 2]), ("scene.teams", [0, 0, -1, 2]),
        ("scene.teams", [1, 1, 1, 2]), ("scene.team_names", ["agents", "enemies"]), ("scene.team_names", []),
        ("scene.health_max", [2]), ("scene.health_max", [-2, 2, 2, 0]), ("scene.shield_max", [4, 0]),
        ("scene.heals", [True]), ("scene.sight", [-3, 0]), ("scene.sight", [3]), ("scene.reach", [1e308, 0]),
        ("scene.bounds", [10, 10, 0, 0]), ("scene.bounds", [0, 0, 0, 10]), ("scene.bounds", [0, 0, 1e308, 10]),
        ("scene.bounds", [20, 20, 30, 30]), ("scene.bounds", None), ("scene.walls", [[4, 3, 3, 5]]),
        ("scene.walls", [[3, 5, 4, 3]]), ("scene.score", ""),
    ],
)  # fmt: skip
def test_a_recording_that_cannot_be_drawn_is_rejected(tmp_path, part, value):
    values = small_recording()
    place = values["episodes"][0]["scene" if part.startswith("scene.") else "moments"]
    (place if isinstance(place, dict) else place[1])[part.removeprefix("scene.")] = value
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(values).encode()))
    with pytest.raises(UserError, match="is no recording"):
        Recording.read(path)


@pytest.mark.parametrize(
    "scene",
    [
        {}, {"torus": True}, {"bounds": [0, 0, 10_000, 1.0], "torus": True}, {"walls": [[3, 3, 3, 3]]}, {"sight": []},
        {"bounds": [0, 0, 1, 10_000]}, {"bounds": [-10_000, -10_000, 10_000, 10_000]}, {"sight": [10_000, 10_000]},
    ],
)  # fmt: skip
def test_what_a_recording_may_hold_at_most_is_drawn(scene):
    values = small_recording()
    values["episodes"][0]["scene"].update(scene)
    values["episodes"][0]["moments"][1].update(
        x=[1.0, -1e4, 8.0, 1e4], beliefs=[[[2, 1e4, -1e4, 9.0]], [[3, 0, 0, None]]]
    )
    (episode,) = Recording.model_validate(values).episodes
    assert all(len(list(drawing.pictures(episode, agent))) == 2 for agent in (0, 1, 5))  # 5: the last one


def test_watch_shows_a_recording_in_every_format_and_names_mistakes(battles, tmp_path, capsys):
    path = battles.write(tmp_path / "a.json.gz")
    assert main(["watch", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(tmp_path / "a.html") and len(lines) == 3 and "skirmish 5m_vs_6m: " in lines[0]
    assert main(["watch", str(path), "--agent", "2", "-o", str(tmp_path / "b.gif")]) == 0
    with Image.open(tmp_path / "b.gif") as gif:
        assert gif.n_frames == sum(len(episode.moments) for episode in battles.episodes)
    capsys.readouterr()
    for words, part in (
        (["watch"], "watch: name the run or a recording"),
        (["watch", "seed=3"], "watch: name the run or a recording"),
        (["watch", str(tmp_path / "gone")], "no such folder"),
        (["watch", str(tmp_path)], "holds no agent.th"),
        (["watch", str(path), "seed=3"], "seed=3: a recording is shown as it is"),
        (["watch", str(path), "--format=avi"], "--format=avi: must be html, gif or mp4"),
        (["watch", str(path), "--agent=5"], "--agent=5: the agents are 0 to 4"),
        (["watch", str(path), "--agent=-1"], "--agent=-1: must be a number"),
        (["watch", str(path), "--episodes=0"], "--episodes=0: must be a number from 1 on"),
        (["watch", str(path), "--output", "/proc/a/b.html"], "cannot be written"),
    ):
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and part in err, words


def test_episodes_that_were_played_are_kept_beside_their_page(battles, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("omagd.run.cli.watch._played", lambda *_: (battles, tmp_path / "replays" / "3m_400"))
    assert main(["watch", str(tmp_path), "-o", str(tmp_path / "b.html")]) == 0 and not (tmp_path / "replays").exists()
    assert main(["watch", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "replays" / "3m_400.html")
    kept = Recording.read(tmp_path / "replays" / "3m_400.json.gz")
    assert kept.packed() == battles.packed()


def test_a_video_needs_the_extra_and_has_all_moments(battles, tmp_path, capsys, monkeypatch):
    path = battles.write(tmp_path / "a.json.gz")
    with monkeypatch.context() as patch:
        patch.setattr("omagd.run.cli.watch.find_spec", lambda name: None)
        assert main(["watch", str(path), "--format=mp4"]) == 2
    assert "needs an extra: pip install" in capsys.readouterr().err
    ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="the extra [watch] is not installed")
    assert main(["watch", str(path), "--format=mp4"]) == 0
    held = drawing.LAST_MS // drawing.MS
    frames = sum(len(episode.moments) + held for episode in battles.episodes)
    assert ffmpeg.count_frames_and_secs(str(tmp_path / "a.mp4"))[0] == frames
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json.gz", "a.mp4"]


def test_pictures_show_units_at_their_places_and_guesses_hollow(battles):
    episode = battles.episodes[0]
    step = max(range(episode.length), key=lambda t: len(episode.moments[t].beliefs[0]))
    image = np.asarray(list(drawing.pictures(episode, 0))[step]).astype(int)
    teal, orange = ((np.abs(image - colour).max(-1) < 40) for colour in ((0x4C, 0xC9, 0xC0), (0xFF, 0x8A, 0x5C)))
    middle = image.shape[1] // 2
    assert teal[:, :middle].sum() > 300 and orange[:, :middle].sum() > 300
    enemies = [belief for belief in episode.moments[step].beliefs[0] if belief[0] >= 5]
    assert len(enemies) == 6 and 0 < orange[:, middle:].sum() < 0.75 * orange[:, :middle].sum()


def changed(**parts):
    """Return the episode of `small_recording` with other parts of its scene and of all its moments."""
    values = small_recording()["episodes"][0]
    for name, value in parts.items():
        for place in values["moments"] if name in Moment.model_fields else [values["scene"]]:
            place[name] = value
    values["values"] = parts.get("kind", values["values"])
    values["scene"].pop("kind", None)
    return Recording.model_validate({"episodes": [values]}).episodes[0]


def test_arrows_and_names_follow_the_actions_of_agents_and_what_others_did():
    episode = changed()
    assert drawing.aims(episode, 0) == [2, -1, 1, -1], "a0 attacks e0, the medic stops, e0 attacks the medic"
    assert drawing.aims(episode, 1) == [-1, -1, 1, -1], "nobody acts after the last step"
    healing = changed(actions=[2, 2])
    assert drawing.aims(healing, 0) == [2, 0, 1, -1]
    assert [drawing.action_name(healing, *each) for each in ((1, 2), (0, 2), (0, 1), (0, 9))] == [
        "heal a0", "attack e0", "north", "action 9",
    ]  # fmt: skip
    dead = changed(actions=[2, 2], alive=[False, True, True, False])
    assert drawing.aims(dead, 0) == [-1, 0, 1, -1]


class Pen:
    """Notes what is written and drawn."""

    def __init__(self):
        self.texts, self.lines = [], []

    def text(self, where, text, **_):
        self.texts.append(text)

    def line(self, ends, **_):
        self.lines.append(ends)

    def __getattr__(self, name):
        return lambda *_, **__: None


def words(episode, step, agent):
    pen = Pen()
    drawing._words(pen, episode, step, agent, (100, 100, True))
    return pen


def test_a_picture_names_the_agent_its_best_actions_the_score_and_in_the_end_the_result():
    episode = changed(values=[[0.5, None, 1.0], [0.25, 0.75, None]])
    pen = words(episode, 0, 0)
    joined = "\n".join(pen.texts)
    for text in ("e m", "step 0 of 1", "agents 1, enemies 2", "What a0 sees and believes"):
        assert text in joined
    assert "a0: attack e0" in joined and re.search(r"Q: attack e0 1,\s+stop 0\.5$", joined) and "return" not in joined
    joined = "\n".join(words(episode, 0, 1).texts)
    assert "What a1 sees" in joined and re.search(r"a1: stop\s+Q: north 0\.75,\s+stop 0\.25$", joined)
    last = words(episode, 1, 0)
    assert "step 1 of 1: return 0.00" in "\n".join(last.texts)
    right = drawing.WIDTH - drawing.GAP
    assert (pen.lines[-1][2], last.lines[-1][2]) == (drawing.GAP, right), "the time line is full in the end"
    assert "probability: " in "\n".join(words(changed(kind="probabilities"), 0, 0).texts)
    dead = words(changed(alive=[False, True, True, False], beliefs=[]), 0, 0).texts
    assert "a0 is dead" in "\n".join(dead) and "What a0 sees" in dead


def views(episode, agent):
    """Return both views of the first moment in whole colours, and how wide each is."""
    image = np.asarray(next(drawing.pictures(episode, agent))).astype(int)
    top, side = drawing.HEADER // drawing.TWICE, drawing.GAP // drawing.TWICE
    wide = (image.shape[1] - 3 * side) // 2
    high = image.shape[0] - (drawing.HEADER + drawing.FOOTER) // drawing.TWICE
    return [image[top : top + high, left : left + wide] for left in (side, 2 * side + wide)]


def of_colour(image, colour, near=40):
    """Return the middle (x, y) of the pixels of a colour and how many there are."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    rows, columns = np.nonzero(np.abs(image - wanted).max(-1) < near)
    return (columns.mean(), rows.mean(), len(rows)) if len(rows) else (np.nan, np.nan, 0)


PLAIN = {
    "bounds": [0, 0, 20, 20], "walls": [], "x": [4.0, 4.0, 16.0, 10.0], "y": [4.0, 16.0, 16.0, 10.0],
    "alive": [True, True, True, False], "marked": [], "bodies": [], "targets": [], "actions": [0, 0],
    "health_max": [0] * 4, "shield_max": [0] * 4, "health": [0.0] * 4, "shield": [0.0] * 4, "sight": [6, 6],
    "seen": ["1", "2"], "beliefs": [],
}  # fmt: skip


def test_the_belief_is_where_the_agent_believes_a_unit_and_a_cross_where_it_is():
    """Agent 0 at the lower left sees itself and takes the enemy, which is at the upper right, to be at (4, 16)."""
    guess = {**PLAIN, "beliefs": [[[2, 4.0, 16.0, None]], []]}
    truth, belief = views(changed(**guess), 0)
    teal, orange = drawing.TEAMS[0], drawing.TEAMS[1]
    enemy = of_colour(truth, orange)
    assert enemy[2] > 100 and enemy[0] > truth.shape[1] / 2 and enemy[1] < truth.shape[0] / 2, "right and up"
    hollow = of_colour(belief, orange)
    assert hollow[0] < belief.shape[1] / 2 and hollow[1] == pytest.approx(enemy[1], abs=4)
    assert 0 < hollow[2] < 0.75 * enemy[2], "a guess is hollow"
    own = of_colour(belief, teal)
    assert own[0] < belief.shape[1] / 2 and own[1] > belief.shape[0] / 2, "the agent, and not the ally that it misses"
    assert of_colour(truth, teal)[2] > 1.7 * own[2]
    around = belief[int(enemy[1]) - 6 : int(enemy[1]) + 7, int(enemy[0]) - 6 : int(enemy[0]) + 7]
    assert of_colour(around, drawing.TEXT)[2] > 5, "a cross"


def test_the_chosen_agent_has_a_ring_and_its_sight_is_bright():
    """Two agents at the left: the upper one is chosen. Sight is drawn in cells of the map."""
    chosen = changed(**{**PLAIN, "seen": ["3", "3"]})
    for panel, lower in zip(views(chosen, 1), views(chosen, 0), strict=True):
        assert of_colour(panel, drawing.TEXT)[1] < panel.shape[0] / 2 < of_colour(lower, drawing.TEXT)[1]
    bright = {}
    for sight in (3, 6):
        panel = views(changed(**{**PLAIN, "x": [10.0, 4.0, 16.0, 10.0], "y": [10.0, 16.0, 16.0, 10.0],
                                 "sight": [sight, 6]}), 0)[1]  # fmt: skip
        bright[sight] = of_colour(panel, drawing.FIELD, near=6)[2]
        enemy = of_colour(views(changed(**PLAIN), 0)[0], drawing.TEAMS[1])
        ally = of_colour(views(changed(**PLAIN), 0)[0][:200], drawing.TEAMS[0])
        cell = (enemy[0] - ally[0]) / 12
        assert 0.7 < bright[sight] / (np.pi * (sight * cell) ** 2) < 1.3, "and some grid lines"
    assert 2.5 < bright[6] / bright[3] < 5
    dead = views(changed(**{**PLAIN, "alive": [False, True, True, False]}), 0)[1]
    assert of_colour(dead, drawing.TEAMS[0])[2] == 0, "the dead see nothing"


def test_rings_show_each_units_share_of_its_own_health():
    def ring(health, most):
        truth = views(changed(**{**PLAIN, "health_max": most, "health": health}), 0)[0]
        return of_colour(truth, drawing.TEAMS[1])[2]

    full, half, none = (ring([9.0, 9.0, share, 0.0], [9, 9, 2, 0]) for share in (2.0, 1.0, 0.0))
    assert full - half == pytest.approx(half - none, rel=0.25) and half - none > 30


def test_what_leaves_a_torus_comes_back_on_the_other_side():
    scene = SimpleNamespace(torus=True, bounds=(2.0, 0.0, 12.0, 10.0))
    assert drawing._inside(scene, 13.0, -1.0) == (3.0, 9.0) and drawing._inside(scene, 2.0, 10.0) == (2.0, 0.0)
    assert [drawing._nearest(gap, 10.0) for gap in (9.0, -9.0, 3.0)] == [-1.0, 1.0, 3.0]
    assert drawing._nearest(9.0, 0.0) == 9.0


def test_animations_show_the_chosen_agent_and_hold_the_end_of_each_episode(battles, tmp_path, monkeypatch):
    shown, pictures = [], drawing.pictures
    monkeypatch.setattr(drawing, "pictures", lambda *each: shown.append(each) or pictures(*each))
    drawing.write_gif(Recording(episodes=battles.episodes[:1]), tmp_path / "a.gif", 2)
    assert shown == [(battles.episodes[0], 2)]
    with Image.open(tmp_path / "a.gif") as gif:
        durations = []
        for number in range(gif.n_frames):
            gif.seek(number)
            durations.append(gif.info["duration"])
    assert set(durations[:-1]) == {drawing.MS} and durations[-1] == drawing.LAST_MS


@pytest.mark.processes
@pytest.mark.parametrize(("dark", "wide"), [(False, 1240), (True, 390)])
def test_the_player_plays_in_a_browser_without_complaints(battles, tmp_path, dark, wide):
    page_file = tmp_path / "battle.html"
    page_file.write_text(player_page(battles, agent=1), encoding="utf-8")
    last = battles.episodes[0].length
    with opened(page_file, dark=dark, wide=wide) as (page, complaints):
        page.locator("#clock", has_text="step").wait_for()
        text = lambda name: page.evaluate(f"document.getElementById('{name}').textContent")  # noqa: E731
        assert (text("clock"), page.evaluate("document.getElementById('agent').value")) == (f"step 0 / {last}", "1")
        assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown"):
            page.keyboard.press(key)
        assert text("clock") == f"step 1 / {last}" and text("belief").startswith("a2: what it sees and believes")
        assert page.evaluate("document.documentElement.scrollWidth") <= wide
        colours = "[...document.querySelectorAll('canvas')].map(c => new Set(new Uint32Array(c.getContext('2d')"
        assert min(page.evaluate(f"{colours}.getImageData(0, 0, c.width, c.height).data.buffer)).size)")) > 5
        page.keyboard.press("End")
        assert text("clock") == f"step {last} / {last}" and "over" in text("doing") + "over" * ("dead" in text("doing"))
        page.keyboard.press(" ")  # plays again from the start
        page.locator("#clock", has_text=re.compile("step [1-9]")).wait_for()  # the policy of the page permits no eval
        page.keyboard.press(" ")
        page.select_option("#episode", "1")
        assert text("clock") == f"step 0 / {battles.episodes[1].length}" and "<b>" in text("policy")
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == ("light" if dark else "dark")
        assert complaints == []


def test_a_page_is_one_file_of_a_reasonable_size(tmp_path):
    recording, _, _ = play(map_name="27m_vs_30m", slots=1)
    (episode,) = recording.episodes
    assert episode.moments[0].beliefs and len(episode.moments[0].values) == 27
    save_recording(recording, tmp_path / "big")
    page = (tmp_path / "big.html").read_text(encoding="utf-8")
    assert len(page) * 100 / episode.length < 2_000_000, "100 steps of the largest map"
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)", page) and "<b>policy" not in page.split("<script")[0]


def test_tensorboard_receives_pictures_and_videos_at_the_time_of_the_last_log(battles, tmp_path):
    logger = make_logger(RunFacts(tmp_path), ["tensorboard"], logging.getLogger("omagd.test"))
    video = drawing.write_gif(Recording(episodes=battles.episodes[:1]), tmp_path / "a.gif", 0)
    logger.picture("too_early", video)
    logger.log({"a": 1.0}, stage="stage3", clock="t_env", t=400)
    logger.picture("test_battle", video)
    logger.picture("gone", tmp_path / "gone.png")
    logger.close()
    events = EventAccumulator(str(tmp_path / "tb" / "stage3")).Reload()
    assert events.Tags()["images"] == ["test_battle"]
    (shown,) = events.Images("test_battle")
    assert shown.step == 400 and shown.encoded_image_string == video.read_bytes()


@pytest.mark.processes
def test_a_trained_run_is_played_with_its_reconstructions(small_run, tmp_path, capsys):
    path = tmp_path / "a.html"
    assert main(["watch", str(small_run), "--episodes=2", "-o", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 and path.stat().st_size < 500_000
    assert main(["watch", str(small_run), "env_args.map_name=8m"]) == 2
    assert "trained on skirmish 3m" in capsys.readouterr().err
    assert (
        main(["evaluate", str(small_run), "save_replay=True", "test_nepisode=2", f"local_results_path={tmp_path}"]) == 0
    )
    (file,) = tmp_path.glob("*/replays/*.json.gz")
    recording = Recording.read(file)
    assert all(moment.beliefs for episode in recording.episodes for moment in episode.moments)
    assert file.with_name("episodes.html").is_file()
    torch.set_num_threads(1)
