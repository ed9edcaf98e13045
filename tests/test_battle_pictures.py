"""Pictures of battles: what a frame of a GIF or a video shows, also of a model that has diverged."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from browser import opened
from many_runs import make_run, make_study
from PIL import Image, ImageColor
from watch_toys import Oracle, play, small_recording

from omagd.lab.watch import drawing, formats, panel
from omagd.run.cli.main import main
from omagd.run.recording.recording import Episode, Moment, Recording
from omagd.utils.errors import UserError


def seen_and_lost() -> Episode:
    """Return a battle of two agents and two enemies, a0 sees e0 at steps 1 and 2, e1 never; a1 dies at step 6."""
    moments = []
    for t in range(9):
        seen = 0b0001 | (0b0100 if t in (1, 2) else 0) | (0b0010 if t < 6 else 0)
        moments.append(
            Moment(
                x=[1.0, 2.0, 5.0 + t, 9.0], y=[1.0, 1.0, 1.0, 4.0], alive=[t < 8, t < 6, True, True],
                health=[10.0, 10.0, 5.0, 10.0], seen=[f"{seen:x}", "2"],
                beliefs=[[(2, 7.0, 2.0, 0.25), (3, "NaN", 1.0, None), (1, 4.0, 4.0, None)], []],
            )
        )  # fmt: skip
    scene = {"ids": ["a0", "a1", "e0", "e1"], "teams": [0, 0, 1, 1], "kinds": [""] * 4, "team_names": ["us", "them"],
             "actions": [], "health_max": [10.0] * 4, "sight": [6.0, 6.0], "bounds": [0, 0, 20, 20]}  # fmt: skip
    about = {"env": "e", "map_name": "m", "seed": 1, "policy": "p", "values": "Q-values", "results": {}}
    return Episode.model_validate({**about, "scene": scene, "moments": moments})


def test_moments_are_those_with_most_to_see_one_of_each_part_of_a_life():
    episode = seen_and_lost()
    assert formats._chosen(episode, 0, [])[0] == [0, 3, 5]  # a unit seen before is hidden from step 3 on
    assert formats._chosen(episode, 1, [])[0] == [0, 2, 4]
    assert formats._chosen(episode, 0, [7, 8])[0] == [7]
    assert formats._chosen(episode, 0, [8]) == ([], 0)


@pytest.fixture(scope="module")
def battles() -> Recording:
    return play(map_name="5m_vs_6m")[0]


def small(**moment) -> Recording:
    """Return `small_recording` without what only games have; `moment`: parts of its second moment."""
    values = small_recording()
    episode = values["episodes"][0]
    episode["scene"].update(score="", walls=[], shield_max=[0, 0, 0, 0])
    for each in episode["moments"]:
        each.update(score=[], shield=[], bodies=[], marked=[], y=[9.0, 1.0, 8.0, 5.0], actions=[0, 2])
    episode["moments"][1].update(moment)
    return Recording.model_validate(values)


def pixels(image, colour):
    return (np.asarray(image).astype(int) == ImageColor.getrgb(colour)).all(-1)


def test_pictures_show_units_at_their_places_and_guesses_hollow(battles):
    episode = battles.episodes[0]
    step = max(range(episode.length), key=lambda t: len(episode.moments[t].beliefs[0]))
    image = np.asarray(list(drawing.pictures(episode, 0))[step]).astype(int)
    teal, orange = ((np.abs(image - colour).max(-1) < 40) for colour in ((0x4C, 0xC9, 0xC0), (0xFF, 0x8A, 0x5C)))
    middle = image.shape[1] // 2
    assert teal[:, :middle].sum() > 300 and orange[:, :middle].sum() > 300
    enemies = [belief for belief in episode.moments[step].beliefs[0] if belief[0] >= 5]
    assert len(enemies) == 6 and 0 < orange[:, middle:].sum() < 0.75 * orange[:, :middle].sum()


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

    def textlength(self, text, **_):
        return 0.0

    def line(self, ends, **_):
        self.lines.append(ends)

    def __getattr__(self, name):
        return lambda *_, **__: None


def words(episode, step, agent):
    pen = Pen()
    drawing._words(pen, episode, step, agent, (100, 100, True))
    drawing._now(pen, episode, drawing.standings(episode), step, 100)
    return pen


def test_a_picture_names_the_agent_its_best_actions_the_score_and_in_the_end_the_result():
    episode = changed(values=[[0.5, None, 1.0], [0.25, 0.75, None]])
    pen = words(episode, 0, 0)
    joined = "\n".join(pen.texts)
    for text in ("e m", "step 0 of 1", "agents 1, enemies 2", "What a0 sees and believes"):
        assert text in joined
    assert re.search(r"(?m)a0: attack e0\s+Q: attack e0 1,\s+stop 0\.5$", joined) and "return" not in joined
    joined = "\n".join(words(episode, 0, 1).texts)
    assert "What a1 sees" in joined and re.search(r"(?m)a1: stop\s+Q: north 0\.75,\s+stop 0\.25$", joined)
    last = words(episode, 1, 0)
    assert "step 1 of 1: return 0.00" in "\n".join(last.texts)
    left, right = drawing.GAP + drawing.NAMES, drawing.WIDTH - drawing.GAP
    ends = pen.lines[-1][0] - left, right - last.lines[-1][0]
    assert ends[0] == ends[1] <= 5 * drawing.TWICE, "the time line goes from one end to the other"
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
    for upper, lower in zip(views(chosen, 1), views(chosen, 0), strict=True):
        assert of_colour(upper, drawing.TEXT)[1] < upper.shape[0] / 2 < of_colour(lower, drawing.TEXT)[1]
    bright = {}
    for sight in (3, 6):
        view = views(changed(**{**PLAIN, "x": [10.0, 4.0, 16.0, 10.0], "y": [10.0, 16.0, 16.0, 10.0],
                                 "sight": [sight, 6]}), 0)[1]  # fmt: skip
        bright[sight] = of_colour(view, drawing.FIELD, near=6)[2]
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


def test_rings_of_shields_show_each_units_share_of_its_own_shield():
    def ring(shield, most):
        unhurt = {"health_max": [9, 9, 9, 0], "health": [9.0, 9.0, 9.0, 0.0]}
        truth = views(changed(**{**PLAIN, **unhurt, "shield_max": most, "shield": shield}), 0)[0]
        return of_colour(truth, panel.SHIELD)

    full, half, none = (ring([0.0, 0.0, share, 0.0], [9, 9, 2, 0]) for share in (2.0, 1.0, 0.0))
    assert full[2] - half[2] == pytest.approx(half[2], rel=0.25) and half[2] > 30 and none[2] == 0
    enemy = of_colour(views(changed(**PLAIN), 0)[0], drawing.TEAMS[1])
    assert full[:2] == pytest.approx(enemy[:2], abs=3), "around the unit that has it"
    assert half[0] > enemy[0] + 3, "from the top clockwise"


def test_who_is_healed_has_an_arrow_of_another_colour_than_who_is_attacked():
    """Agent 1 at the upper left heals agent 0 below it, or attacks the enemy at its right."""
    healing = {**PLAIN, "heals": [False, True, False, False], "actions": [0, 2]}
    attack = {**PLAIN, "heals": [False] * 4, "actions": [0, 2]}
    plain = views(changed(**PLAIN), 0)[0]
    heal, fight = (views(changed(**each), 0)[0] for each in (healing, attack))
    green = of_colour(heal, drawing.HEAL, near=20)
    assert green[2] > 30 and of_colour(fight, drawing.HEAL, near=20)[2] == 0
    assert green[:2] == pytest.approx(of_colour(plain, drawing.TEAMS[0])[:2], abs=8), "between both agents"
    teal = [of_colour(view, drawing.TEAMS[0])[2] for view in (plain, heal, fight)]
    assert teal[2] > teal[0] + 30 and teal[1] < teal[0] + 30, "an attack has the colour of who attacks"
    theirs = views(changed(**{**PLAIN, "targets": [-1, -1, 0, -1]}), 0)[0]
    assert of_colour(theirs, drawing.TEAMS[1])[2] > of_colour(plain, drawing.TEAMS[1])[2] + 30


def test_walls_are_where_they_are_in_both_views():
    """One low at the right: 6 x 2 cells, seen by the agent's view as well."""
    walled = {**PLAIN, "walls": [[12, 5, 18, 7]], "sight": [0, 0]}
    plain = views(changed(**{**PLAIN, "sight": [0, 0]}), 0)
    left, right = (of_colour(plain[0], drawing.TEAMS[team]) for team in (0, 1))
    cell = (right[0] - left[0]) / 12
    corner = left[0] - 4 * cell, left[1] + 10 * cell  # the agents' middle is at (4, 10)
    for view, before in zip(views(changed(**walled), 0), plain, strict=True):
        wall = of_colour(view, panel.WALL, near=8)
        assert of_colour(before, panel.WALL, near=8)[2] < 0.1 * wall[2]
        assert wall[2] == pytest.approx(6 * 2 * cell**2, rel=0.15)
        assert wall[:2] == pytest.approx((corner[0] + 15 * cell, corner[1] - 6 * cell), abs=cell / 2)


def test_each_unit_has_its_own_name_seen_or_guessed():
    view = panel.Panel(small().episodes[0], (0, 0, 10, 10), (800, 800))
    pen = view.draw = Pen()
    for unit, guessed in ((0, False), (1, True), (2, False), (2, True)):
        view.unit(unit, (400, 400), 1.0, 0.0, guessed=guessed)
    assert pen.texts == ["a0", "a1", "e0", "e0"]


def test_a_guess_beyond_the_edge_of_a_torus_is_shown_where_it_is_on_the_map():
    def believed(x, y, torus):
        """Return agent 0's view where it takes the enemy to be at (x, y), on a map of 20 x 20 cells."""
        return views(changed(**{**PLAIN, "torus": torus, "sight": [0, 0], "beliefs": [[[2, x, y, None]], []]}), 0)[1]

    inside = believed(4.0, 12.0, True)
    assert of_colour(inside, drawing.TEAMS[1])[2] > 20
    assert np.array_equal(inside, believed(24.0, -8.0, True))
    assert not np.array_equal(believed(4.0, 12.0, False), believed(24.0, -8.0, False)), "a map with edges"


def test_the_dead_see_nothing_whatever_a_recording_says():
    """The recording of a dead agent may still have what it saw last."""
    dead = {**PLAIN, "alive": [False, True, True, False], "seen": ["7", "7"]}
    belief = views(changed(**dead), 0)[1]
    assert of_colour(belief, drawing.TEAMS[0])[2] == of_colour(belief, drawing.TEAMS[1])[2] == 0
    assert of_colour(belief, drawing.FOG, near=6)[2] > 0.8 * belief[..., 0].size, "it is dark"
    assert of_colour(belief, drawing.TEXT)[2] > 50, "it says why"
    living = views(changed(**{**dead, "alive": [True, True, True, False]}), 0)[1]
    assert min(of_colour(living, drawing.TEAMS[team])[2] for team in (0, 1)) > 100
    dark = (of_colour(view, drawing.FOG, near=6)[2] for view in (belief, living))
    assert next(dark) > next(dark) + 3000, "the living see what is around them"


def test_a_video_shows_the_chosen_agent_and_holds_the_end_of_each_episode(tmp_path, monkeypatch):
    """By a stand-in for the encoder: its frames are the pictures of all episodes, in their order."""
    given, frames = [], []

    def write_frames(path, size, **options):
        given.append((size, options["fps"]))
        Path(path).write_text("video")
        while True:
            frames.append((yield))

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace(write_frames=write_frames))
    episodes = [changed(), changed(alive=[True, True, False, False])]
    made = [list(drawing.pictures(episode, 1)) for episode in episodes]
    target = formats.write_mp4(Recording(episodes=episodes), tmp_path / "new" / "a.mp4", 1)
    hold = formats.LAST_MS // formats.MS
    expected = [image.tobytes() for each in made for image in each + each[-1:] * hold]
    assert frames == expected and given == [(made[0][0].size, 1000 / formats.MS)]
    assert made[0][0].tobytes() != next(drawing.pictures(episodes[0], 0)).tobytes(), "agents have views of their own"
    assert [path.name for path in target.parent.iterdir()] == ["a.mp4"] and target.read_text() == "video"

    def fails(path, size, **_):
        Path(path).write_text("half")
        yield
        raise OSError("no space left")

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace(write_frames=fails))
    with pytest.raises(OSError, match="no space"):
        formats.write_mp4(Recording(episodes=episodes), target, 1)
    assert [path.name for path in target.parent.iterdir()] == ["a.mp4"] and target.read_text() == "video"


def test_what_leaves_a_torus_comes_back_on_the_other_side():
    scene = SimpleNamespace(torus=True, bounds=(2.0, 0.0, 12.0, 10.0))
    assert drawing._inside(scene, 13.0, -1.0) == (3.0, 9.0) and drawing._inside(scene, 2.0, 10.0) == (2.0, 0.0)
    assert [panel.nearest(gap, 10.0) for gap in (9.0, -9.0, 3.0)] == [-1.0, 1.0, 3.0]
    assert panel.nearest(9.0, 0.0) == 9.0


def test_animations_show_the_chosen_agent_and_hold_the_end_of_each_episode(battles, tmp_path, monkeypatch):
    shown, pictures = [], drawing.pictures
    monkeypatch.setattr(formats, "pictures", lambda *each: shown.append(each) or pictures(*each))
    formats.write_gif(Recording(episodes=battles.episodes[:1]), tmp_path / "a.gif", 2)
    assert shown == [(battles.episodes[0], 2)]
    with Image.open(tmp_path / "a.gif") as gif:
        durations = []
        for number in range(gif.n_frames):
            gif.seek(number)
            durations.append(gif.info["duration"])
    assert set(durations[:-1]) == {formats.MS} and durations[-1] == formats.LAST_MS


@pytest.mark.parametrize("cells", [10, 20, 60])
@pytest.mark.parametrize("guessed", [False, True])
def test_opponents_are_square_and_agents_round_at_every_size(cells, guessed):
    view = panel.Panel(small().episodes[0], (0, 0, cells, cells), (800, 800))
    far = round(0.85 * view.radius)
    for unit, square in ((0, False), (2, True)):
        view.draw.rectangle((0, 0, 800, 800), fill="black")
        view.unit(unit, (400, 400), 1.0, 0.0, guessed=guessed)
        ink = pixels(view.image, panel.TEAMS[view.scene.teams[unit]])
        corners = [ink[400 + far : 403 + far, 400 + far : 403 + far], ink[397 - far : 400 - far, 397 - far : 400 - far]]
        assert [corner.any() for corner in corners] == [square] * 2 and ink.any()


@pytest.mark.parametrize("unit", [0, 2])
def test_the_ring_shows_the_share_of_health_from_the_top_clockwise(unit):
    view = panel.Panel(small().episodes[0], (0, 0, 10, 10), (800, 800))
    colour = panel.TEAMS[view.scene.teams[unit]]
    view.draw.rectangle((0, 0, 800, 800), fill="black")
    view.ring(view.scene.teams[unit], (400, 400), view.radius, colour, 0.25)
    ink = pixels(view.image, colour)
    assert ink[:399, 401:].sum() > 50, "the upper right quarter"
    assert ink[:, :398].sum() == 0 == ink[402:].sum()


def test_the_time_line_shows_what_both_teams_have_left_and_the_moment():
    recording = small(health=[1.0, 1.0, 0.0, 0.0], alive=[True, False, True, False], targets=[], beliefs=[], actions=[],
                      values=[])  # fmt: skip
    episode = recording.episodes[0]
    # Agents: 1 + 2 of 2 + 2 points, then 1 (the dead one's point does not count); the only enemy: 0 of 2.
    assert drawing.standings(episode) == [(0.75, 0.0), (0.25, 0.0)]
    assert drawing.standings(Recording.model_validate(small_recording()).episodes[0]) == [(1.0, 2.0)] * 2, "the score"
    cursors = []
    for image in drawing.pictures(episode, 0):
        line = pixels(image, panel.TEXT)[-drawing.STRIP // 2 : -drawing.GAP // 2].sum(0)
        cursors.append(int(np.argmax(line)))
        assert pixels(image, panel.TEAMS[0])[-drawing.STRIP // 2 :, drawing.NAMES // 2 + 20 :].sum() > 100
    assert cursors[0] < 200 and cursors[1] > image.width - 30


def test_the_view_of_a_dead_agent_says_that_it_is_dead():
    recording = small(alive=[True, False, True, False], targets=[], actions=[], values=[], beliefs=[])
    image = np.asarray(list(drawing.pictures(recording.episodes[0], 1))[1])
    view = image[drawing.HEADER // 2 + 20 : -drawing.FOOTER // 2 - 20, image.shape[1] // 2 + 20 :]
    middle = pixels(view, panel.TEXT)[view.shape[0] // 3 : -view.shape[0] // 3]
    assert middle.sum() > 20


def test_a_gif_keeps_the_colours_that_mean_something(tmp_path):
    healing = small().episodes[0]  # the medic heals a0: a thin green arrow in one picture of many
    recording = Recording(episodes=[play(map_name="3m")[0].episodes[0], healing])
    with Image.open(formats.write_gif(recording, tmp_path / "a.gif", 0)) as gif:
        gif.seek(gif.n_frames - 2)
        assert pixels(gif.convert("RGB"), panel.HEAL).sum() > 5


def test_words_that_are_too_long_are_cut():
    view = panel.Panel(small().episodes[0], (0, 0, 10, 10), (800, 800))
    for text in ("a policy", "word " * 60, "w" * 10_000):
        cut = panel.fitted(view.draw, text, 13, 500)
        assert view.draw.textlength(cut, font=panel.font_of(26)) <= 500
        assert cut == text if len(text) < 10 else cut.endswith("…") and text.startswith(cut[:-1]) and len(cut) > 20


class Diverged(Oracle):
    """An oracle whose values and guesses have become infinite or no numbers."""

    def act(self, tick, explore):
        decision = super().act(tick, explore)
        decision.values[:, 0] = np.nan
        decision.values[:, 1] = np.inf
        if decision.extras:
            decision.extras["recon"][:, 0] *= np.nan
        return decision


def strict(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.fixture(scope="module")
def diverged() -> Recording:
    recording, _, _ = play(map_name="5m_vs_6m", policy=Diverged)
    return recording


def test_a_diverged_model_is_recorded_as_valid_json_and_read_again(diverged, tmp_path):
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
    _, _, policy = play(map_name="3m", policy=lambda info: Diverged(info, logits=True))
    assert policy.outputs_logits


@pytest.mark.processes
def test_a_diverged_model_is_shown(diverged, tmp_path):
    page_file, step = tmp_path / "a.html", max(range(8), key=lambda t: len(diverged.episodes[0].moments[t].beliefs[0]))
    assert diverged.episodes[0].moments[step].beliefs[0]
    page_file.write_text(formats.player_page(diverged), encoding="utf-8")
    with opened(page_file, f"#step={step}", wide=390) as (page, complaints):
        page.locator("#clock", has_text="step").wait_for()
        text = lambda name: page.evaluate(f"document.getElementById('{name}').textContent")  # noqa: E731
        assert "not a number" in text("values") and "not a number" in text("sees")
        page.keyboard.press("ArrowDown")
        assert "infinity" in text("values") and "not a number" not in text("sees")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert complaints == []
    words = []
    for agent in (0, 1):
        assert len(list(drawing.pictures(diverged.episodes[0], agent))) == diverged.episodes[0].length + 1
        words.append(drawing._doing(diverged.episodes[0], step, agent))
    assert "not a number" in words[0] and "infinity" in words[1]


def test_pictures_of_moments_show_the_agent_of_which_there_is_most_to_see(tmp_path, monkeypatch):
    drawn, sheet = [], formats.sheet
    monkeypatch.setattr(formats, "sheet", lambda *each: drawn.append(each[1:]) or sheet(*each))
    recording = Recording(episodes=[seen_and_lost()])
    for agent, steps in ((None, []), (1, [2]), (9, [2])):
        formats.write_png(recording, tmp_path / "a.png", agent, steps)
    assert drawn == [(0, [0, 3, 5]), (1, [2]), (1, [2])]
    with pytest.raises(UserError, match="the agent is dead at all of these steps"):
        formats.write_png(recording, tmp_path / "a.png", 1, [7])
    blind = changed(seen=[])
    with pytest.raises(UserError, match="observations have none"):
        formats.write_png(Recording(episodes=[blind]), tmp_path / "a.png")


def test_a_moment_is_shown_as_seen_as_reconstructed_and_as_it_was():
    """a0 takes e0, two cells behind its real place, for wounded, and the dead a1 for living; e1 is not a number."""
    assert drawing._notes(seen_and_lost(), 7, 0) == (
        "0 of 2 living units in sight", "2 unseen believed alive, off by 5.1 cells, 1 of them dead", "2 alive, 1 dead"
    )  # fmt: skip
    assert drawing._notes(seen_and_lost(), 1, 1)[1] == "nothing to fill in"
    image = np.asarray(drawing.sheet(seen_and_lost(), 0, [7, 1])).astype(int)
    rows = np.array_split(image[: -drawing.LEGEND // drawing.TWICE], 2)
    for row, enemies in zip(rows, ((0, 1, 2), (1, 1, 2)), strict=True):
        panels = np.array_split(row[drawing.HEADINGS // drawing.TWICE :], 3, axis=1)
        orange = [of_colour(view, drawing.TEAMS[1])[2] for view in panels]
        assert [pixels > 20 for pixels in orange] == [number > 0 for number in enemies] and orange[2] > orange[1]
        assert all(of_colour(view, drawing.TEAMS[0])[2] > 50 for view in panels)


def test_marks_at_one_place_are_moved_apart_but_not_far():
    places = np.array([[0.0, 0.0], [0.0, 0.0], [0.1, 0.0], [9.0, 9.0]])
    moved = panel.spread(places, 1.0, 2.0)
    away = np.hypot(*(moved[:, None] - moved[None]).T)[~np.eye(4, dtype=bool)]
    assert away.min() > 0.9 and np.hypot(*(moved - places).T).max() <= 2.0 and (moved[3] == places[3]).all()
    crowd = panel.spread(np.zeros((40, 2)), 1.0, 0.5)
    assert np.isfinite(crowd).all() and np.hypot(*crowd.T).max() <= 0.5 + 1e-9
    assert panel.spread(np.zeros((0, 2)), 1.0, 1.0).shape == (0, 2)


def test_a_study_is_one_line_that_names_its_runs(tmp_path, capsys):
    study = tmp_path / "study"
    runs = list(make_study(study / "runs", seeds=range(4)).iterdir())
    assert main(["watch", str(study)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "holds 12 runs, and none has saved weights yet" in err
    for folder in runs:
        (folder / "models" / "400").mkdir(parents=True)
    assert main(["watch", str(study)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "holds 12 runs with weights" in err and "and 4 more" in err
    assert sum(f"runs/{folder.name}" in err for folder in runs) == 8


def test_the_only_run_of_a_study_is_played(tmp_path, monkeypatch):
    make_run(tmp_path / "study" / "runs" / "other")
    only = make_run(tmp_path / "study" / "runs" / "only")
    (only / "models" / "400").mkdir(parents=True)
    played = []

    def note(run, texts, command):
        played.append(run)
        raise KeyError(run)

    monkeypatch.setattr("omagd.run.training.evaluate.evaluation_config", note)
    for given in (tmp_path / "study", only, only / "models", only / "models" / "400"):
        with pytest.raises(KeyError):
            main(["watch", str(given), "seed=3"])
    assert played == [str(only), str(only), str(only / "models"), str(only / "models" / "400")]
