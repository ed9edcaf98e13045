"""Recordings of battles, and the page and GIF that show them."""

from __future__ import annotations

import gzip
import io
import json
import logging
import re

import numpy as np
import pytest
import torch
from browser import opened
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from omagd.components.action_selectors import log_softmax
from omagd.config.loading import resolve
from omagd.controllers.types import Decision
from omagd.envs.factory import make_env
from omagd.envs.protocol import random_actions
from omagd.lab.watch import drawing, formats
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.run.cli.main import main
from omagd.run.recording.recorder import Recorder
from omagd.run.recording.recording import Episode, Recording
from omagd.run.reporting.log_sinks import make_logger
from omagd.runners.runner import Runner, TaskStarts
from omagd.utils.errors import UserError
from omagd.utils.logging import RunFacts
from omagd.utils.seeding import EpisodeSeeds


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
        obs = obs_to_nodes(data["obs"], self.info.layout)
        living = (data["obs"] != 0).any(-1, keepdim=True)
        return data["recon"], ~obs.any(-1) & living  # also of what it believes to be dead


class Diverged(Oracle):
    """An oracle whose values and guesses have become infinite or no numbers."""

    def act(self, tick, explore):
        decision = super().act(tick, explore)
        decision.values[:, 0] = np.nan
        decision.values[:, 1] = np.inf
        if decision.extras:
            decision.extras["recon"][:, 0] *= np.nan
        return decision


def play(name="skirmish", episodes=1, slots=2, policy=Oracle, **env_args):
    """Return the recording of some episodes of an environment, its entries in the log, and the policy."""
    env = make_env(name, env_args, slots, processes=False)
    try:
        made = policy(env.info)
        recorder = Recorder(made, env, env.info, "a <b>policy</b>", most=episodes)
        tasks = env.info.tasks
        stream = TaskStarts(3, "test", weights=[1.0] * len(tasks)) if tasks else EpisodeSeeds(3, "test")
        runner = Runner(env, resolve("qmix", None, {}), env.info, stream)
        layout = env.info.layout is not None
        log = runner.run(recorder, explore=None, episodes_per_slot=episodes, full_obs=layout, keep=False).log
        recorder.take(log)
        return Recording(episodes=recorder.episodes), [entry for entry in log if entry["slot"] == 0], made
    finally:
        env.close()


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


@pytest.fixture(scope="module")
def battles() -> Recording:
    return play(episodes=2, map_name="5m_vs_6m")[0]


@pytest.mark.parametrize(("name", "args"), [
    ("skirmish", {"map_name": "MMM"}), ("skirmish", {"map_name": "3m,5m_vs_6m"}),
    ("snakes_3v3", {"obs": "entities", "sight": 4.0}), ("matrix_game", {}),
    ("lbf", {"map_name": "2s-8x8-2p-2f-coop", "time_limit": 9}),
    ("gymma", {"key": "pz-mpe-simple-spread-v3", "max_cycles": 5}),
])  # fmt: skip
def test_a_recording_is_what_happens_when_its_actions_are_played_again(name, args):
    recording, log, _ = play(name, episodes=2, **args)
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


def test_a_file_is_read_as_it_was_written_and_a_wrong_one_is_one_line(battles, tmp_path, capsys, monkeypatch):
    path = battles.write(tmp_path / "deep" / "a.json.gz")
    assert Recording.read(path).packed() == path.read_bytes() == battles.packed()
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: 5e8)
        assert battles.packed() == path.read_bytes(), "whenever it is written"
    values = json.loads(gzip.decompress(path.read_bytes()))
    with monkeypatch.context() as patch:
        patch.setattr("omagd.run.recording.recording.LARGEST", len(gzip.decompress(path.read_bytes())) - 1)
        with pytest.raises(UserError, match="holds more than"):
            Recording.read(path)
    for name, content, words in (
        ("torn", path.read_bytes()[:-40], "is damaged"),
        ("text", b"not compressed", "is damaged"),
        ("other", gzip.compress(b'{"a": 1}'), "is no recording"),
        ("list", gzip.compress(b"[]"), "is no recording"),
        ("empty", gzip.compress(json.dumps({**values, "episodes": []}).encode()), "is no recording"),
        ("later", gzip.compress(json.dumps({**values, "version": 2}).encode()), "is of a later version"),
    ):
        wrong = tmp_path / f"{name}.json.gz"
        wrong.write_bytes(content)
        with pytest.raises(UserError, match=words):
            Recording.read(wrong)
        assert main(["watch", str(wrong)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and words in err
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(("part", "value"), [
    ("marked", [999]), ("seen", ["zz", "0"]), ("seen", []), ("x", [10**400, 1, 1, 1]), ("bodies", [[1.0]]),
    ("health", []), ("score", [1.0]), ("beliefs", [[[4, 1.0, 1.0, None]], []]), ("values", [[0.5, None, 1.0]]),
    ("scene.teams", [0, 0, 9, 2]), ("scene.teams", [0, 1, 0, 2]), ("scene.teams", [1, 1, 1, 2]),
    ("scene.team_names", []), ("scene.bounds", [0, 10, 10, 0]), ("scene.bounds", [20, 20, 30, 30]),
    ("scene.health_max", [2]), ("scene.health_max", [-2, 2, 2, 0]), ("scene.sight", [3]), ("scene.score", ""),
    ("scene.sight", [-3, 0]), ("scene.reach", [1e308, 0]), ("scene.bounds", [0, 0, 1e308, 10]), ("scene.bounds", None),
    ("scene.walls", [[4, 3, 3, 5]]), ("scene.ids", ["a0", "a0", "e0", "b0"]), ("x", [1e300, 1, 1, 1]),
    ("bodies", [[1.0], [], [], []]), ("bodies", [[1.0, 1e308], [], [], []]), ("marked", [3]), ("actions", [-9, 0]),
    ("beliefs", [[[2, 1e300, 1.0, None]], []]),
])  # fmt: skip
def test_a_recording_that_cannot_be_drawn_is_rejected(tmp_path, part, value):
    values = small_recording()
    place = values["episodes"][0]["scene" if part.startswith("scene.") else "moments"]
    (place if isinstance(place, dict) else place[1])[part.removeprefix("scene.")] = value
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(values).encode()))
    with pytest.raises(UserError, match="is no recording"):
        Recording.read(path)


def test_watch_shows_a_recording_in_every_format_and_names_mistakes(battles, tmp_path, capsys):
    path = battles.write(tmp_path / "a.json.gz")
    assert main(["watch", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(tmp_path / "a.html") and len(lines) == 3 and "skirmish 5m_vs_6m: " in lines[0]
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)", page), "it needs no network"
    assert "<b>policy" not in page.split("<script")[0] and "&lt;b&gt;policy" in page
    assert main(["watch", str(path), "--agent", "2", "-o", str(tmp_path / "b.gif")]) == 0
    with Image.open(tmp_path / "b.gif") as gif:
        assert gif.n_frames == sum(len(episode.moments) for episode in battles.episodes)
    for words, rows in (([], 3), (["--steps=0,2", "--agent=2"], 2)):
        assert main(["watch", str(path), "--format=png", *words]) == 0
        with Image.open(tmp_path / "a.png") as png:
            assert png.width == drawing.SHEET // 2 and abs(png.height - rows * 400) < 60 * rows
    blind = play(map_name="5m_vs_6m", policy=lambda info: Oracle(info, guesses=False))[0].episodes[0]
    assert drawing.sheet(blind, 0, [0]).width < 0.7 * png.width, "without beliefs there is no panel of them"
    capsys.readouterr()
    for words, part in (
        (["watch"], "watch: no run in results/. Name one, as in: omagd watch results/<run>"),
        (["watch", str(tmp_path / "gone")], "no such folder"),
        (["watch", str(path), "seed=3"], "seed=3: a recording is shown as it is"),
        (["watch", str(path), "--agent=5"], "--agent=5: the agents are 0 to 4"),
        (["watch", str(path), "--output", "/proc/a/b.html"], "cannot be written"),
    ):
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and part in err, words


def strict(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_a_picture_draws_a_guess_hollow_where_it_is_and_a_cross_where_the_unit_is():
    """Agent 0, at the lower left, takes the enemy at the upper right (16, 16) to be at (4, 16)."""
    values = small_recording()
    (first,) = values["episodes"]
    first["scene"].update(bounds=[0, 0, 20, 20], walls=[])
    for moment in first["moments"]:
        moment.update(x=[4.0, 4.0, 16.0, 10.0], y=[4.0, 16.0, 16.0, 10.0], seen=["1", "2"], marked=[],
                      bodies=[], targets=[], beliefs=[[[2, 4.0, 16.0, None]], []])  # fmt: skip
    image = np.asarray(next(drawing.pictures(Recording.model_validate(values).episodes[0], 0))).astype(int)
    top, side = drawing.HEADER // drawing.TWICE, drawing.GAP // drawing.TWICE
    wide, high = (image.shape[1] - 3 * side) // 2, image.shape[0] - top - side
    truth, belief = (image[top : top + high, left : left + wide] for left in (side, 2 * side + wide))

    def where(view, colour):
        near = np.abs(view - [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).max(-1) < 40
        return (np.argwhere(near).mean(0), near.sum())

    (enemy, filled), (guess, hollow) = (where(view, drawing.TEAMS[1]) for view in (truth, belief))
    assert enemy[0] < 0.25 * high and enemy[1] > 0.75 * wide, "up and right"
    assert guess == pytest.approx((enemy[0], wide - enemy[1]), abs=4) and 0 < hollow < 0.75 * filled
    row, column = map(int, enemy)
    assert where(belief[row - 6 : row + 7, column - 6 : column + 7], drawing.TEXT)[1] > 5, "a cross"


def test_what_an_environment_draws_is_shown_in_every_format(tmp_path, caplog):
    """It begins to draw at the first picture of an episode; one that cannot draw plays on."""
    painted = play("pettingzoo", key="foreign_worlds:Painted")[0]
    path = painted.write(tmp_path / "painted.json.gz")
    assert Recording.read(path) == painted and painted.episodes[0].moments[0].x == [0.0, 1.0]
    shades = [set(image.get_flattened_data()) & {(t, 200, 9) for t in range(9)} for image in
              drawing.pictures(painted.episodes[0], 0)]  # fmt: skip
    assert shades == [{(t, 200, 9)} for t in range(5)]
    for kind in ("gif", "png"):
        assert main(["watch", str(path), f"--format={kind}"]) == 0
    broken = play("pettingzoo", key="foreign_worlds:Painted", broken=True)[0].episodes[0]
    assert not broken.moments[0].picture and "env_args.key=foreign_worlds:Painted: it cannot draw: no" in caplog.text
    assert [moment.actions for moment in broken.moments] == [moment.actions for moment in painted.episodes[0].moments]
    damaged = painted.episodes[0].model_dump()
    damaged["moments"][1]["picture"] = "iVBORw0KGgo="
    with pytest.raises(ValueError, match="cannot be drawn"):
        Episode.model_validate(damaged)


def test_a_diverged_model_is_recorded_as_valid_json_read_again_and_drawn(tmp_path):
    diverged = play(map_name="5m_vs_6m", policy=Diverged)[0]
    path = diverged.write(tmp_path / "a.json.gz")
    values = json.loads(gzip.decompress(path.read_bytes()), parse_constant=strict)
    moments = values["episodes"][0]["moments"]
    assert {v for moment in moments for v in moment["values"][0]} <= {None, "NaN"}
    assert {v for moment in moments for v in moment["values"][1]} <= {None, "Infinity"}
    assert any(isinstance(v, float) for moment in moments for v in moment["values"][2])
    broken = [belief for moment in moments for belief in moment["beliefs"][0]]
    assert broken and all(belief[1:3] == ["NaN", "NaN"] for belief in broken)
    assert Recording.read(path).packed() == diverged.packed()
    older = gzip.decompress(path.read_bytes()).replace(b'"NaN"', b"NaN").replace(b'"Infinity"', b"Infinity")
    path.write_bytes(gzip.compress(older))
    assert Recording.read(path).packed() == diverged.packed()
    assert len(list(drawing.pictures(diverged.episodes[0], 0))) == diverged.episodes[0].length + 1


@pytest.mark.processes
def test_the_player_plays_in_a_browser_without_complaints(battles, tmp_path):
    page_file = tmp_path / "battle.html"
    diverged = play(map_name="5m_vs_6m", policy=Diverged)[0].episodes
    painted = play("pettingzoo", key="foreign_worlds:Painted")[0].episodes
    shown = Recording(episodes=[*battles.episodes, *diverged, *painted])
    page_file.write_text(formats.player_page(shown, agent=1), encoding="utf-8")
    last = battles.episodes[0].length
    with opened(page_file, dark=True, wide=390) as (page, complaints):
        page.locator("#clock", has_text="step").wait_for()
        text = lambda name: page.evaluate(f"document.getElementById('{name}').textContent")  # noqa: E731
        assert (text("clock"), page.evaluate("document.getElementById('agent').value")) == (f"step 0 / {last}", "1")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown"):
            page.keyboard.press(key)
        assert text("clock") == f"step 1 / {last}" and text("belief").startswith("a2: what it sees and believes")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        canvas = "document.createElement('canvas').getContext('2d')"  # agents are round, opponents square
        corner = f"unit => {{ const c = {canvas}; shape(c, unit, [50, 50], 20); return c.isPointInPath(66, 66); }}"
        assert [page.evaluate(corner, unit) for unit in (0, 5)] == [False, True]
        colours = "[...document.querySelectorAll('canvas')].map(c => new Set(new Uint32Array(c.getContext('2d')"
        assert min(page.evaluate(f"{colours}.getImageData(0, 0, c.width, c.height).data.buffer)).size)")) > 5
        page.keyboard.press("End")
        assert text("clock") == f"step {last} / {last}" and "over" in text("doing") + "over" * ("dead" in text("doing"))
        page.keyboard.press(" ")  # plays again from the start
        page.locator("#clock", has_text=re.compile("step [1-9]")).wait_for()  # the policy of the page permits no eval
        page.keyboard.press(" ")
        page.select_option("#episode", "1")
        assert text("clock") == f"step 0 / {battles.episodes[1].length}" and "<b>" in text("policy")
        page.select_option("#episode", "2")
        for agent, words in (("1", "infinity"), ("0", "not a number")):
            page.select_option("#agent", agent)
            assert words in text("values")
        page.select_option("#episode", "3")
        page.keyboard.press("End")
        while not page.evaluate("!!pictures[at]"):  # it is decoded; the policy permits no wait_for_function
            page.wait_for_timeout(20)
        shown_there = Image.open(io.BytesIO(page.locator("#truth").screenshot())).convert("RGB")
        assert shown_there.getpixel((shown_there.width // 2, shown_there.height // 2)) == (4, 200, 9)
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        assert complaints == []


def test_tensorboard_receives_pictures_and_videos_at_the_time_of_the_last_log(battles, tmp_path):
    logger = make_logger(RunFacts(tmp_path), ["tensorboard"], logging.getLogger("omagd.test"))
    video = formats.write_gif(Recording(episodes=battles.episodes[:1]), tmp_path / "a.gif", 0)
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
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and re.fullmatch(r"weights of step \d+", lines[0]) and path.stat().st_size < 500_000
    assert main(["watch", str(small_run), "load_step=1", "-o", str(path)]) == 0
    first = min(int(step.name) for step in (small_run / "models").iterdir() if step.name.isdecimal())
    said = f"weights of step {first} (of those saved, the nearest to load_step=1)"
    assert capsys.readouterr().out.splitlines()[0] == said
    assert main(["watch", str(small_run), "env_args.map_name=8m"]) == 2
    assert "trained on skirmish 3m" in capsys.readouterr().err
    words = ("save_replay=True", "test_nepisode=2", f"local_results_path={tmp_path}")
    assert main(["evaluate", str(small_run), *words]) == 0
    (file,) = tmp_path.glob("*/replays/*.json.gz")
    recording = Recording.read(file)
    assert all(moment.beliefs for episode in recording.episodes for moment in episode.moments)
    assert file.with_name("episodes.html").is_file()
    torch.set_num_threads(1)
