"""Pictures of battles: what a frame of a GIF shows, also of a model that has diverged."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
from browser import opened
from PIL import Image, ImageColor
from watch_toys import Oracle, play, small_recording

from omagd.lab.watch import drawing, formats, panel
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


@pytest.mark.parametrize(
    "scene",
    [
        {"sight": []}, {"bounds": [0, 0, 10_000, 1.0], "torus": True}, {"walls": [[3, 3, 3, 3]]},
        {"bounds": [-10_000, -10_000, 10_000, 10_000], "sight": [10_000, 10_000]},
    ],
)  # fmt: skip
def test_what_a_recording_may_hold_at_most_is_drawn(scene):
    values = small_recording()
    values["episodes"][0]["scene"].update(scene)
    values["episodes"][0]["moments"][1].update(
        x=[1.0, -1e4, 8.0, 1e4], beliefs=[[[2, 1e4, -1e4, 9.0]], [[3, 0, 0, None]]]
    )
    (episode,) = Recording.model_validate(values).episodes
    assert all(len(list(drawing.pictures(episode, agent))) == 2 for agent in (0, 5))  # 5: the last one


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


def test_what_leaves_a_torus_comes_back_on_the_other_side():
    scene = SimpleNamespace(torus=True, bounds=(2.0, 0.0, 12.0, 10.0))
    assert drawing._inside(scene, 13.0, -1.0) == (3.0, 9.0) and drawing._inside(scene, 2.0, 10.0) == (2.0, 0.0)
    assert [panel.nearest(gap, 10.0) for gap in (9.0, -9.0, 3.0)] == [-1.0, 1.0, 3.0]
    assert panel.nearest(9.0, 0.0) == 9.0


def test_a_gif_keeps_the_colours_that_mean_something(tmp_path):
    healing = small().episodes[0]  # the medic heals a0: a thin green arrow in one picture of many
    recording = Recording(episodes=[play(map_name="3m")[0].episodes[0], healing])
    with Image.open(formats.write_gif(recording, tmp_path / "a.gif", 0)) as gif:
        gif.seek(gif.n_frames - 2)
        assert pixels(gif.convert("RGB"), panel.HEAL).sum() > 5


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
