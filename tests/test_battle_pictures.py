"""Pictures of battles: what a frame of a GIF shows, also of a model that has diverged."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from watch_toys import Diverged, play, small_recording

from omagd.lab.watch import drawing
from omagd.run.recording.recording import Moment, Recording


def changed(**parts):
    """Return the episode of `small_recording` with other parts of its scene and of all its moments."""
    values = small_recording()["episodes"][0]
    for name, value in parts.items():
        for place in values["moments"] if name in Moment.model_fields else [values["scene"]]:
            place[name] = value
    values["values"] = parts.get("kind", values["values"])
    values["scene"].pop("kind", None)
    return Recording.model_validate({"episodes": [values]}).episodes[0]


def views(episode, agent):
    """Return both views of the first moment in whole colours, and how wide each is."""
    image = np.asarray(next(drawing.pictures(episode, agent))).astype(int)
    top, side = drawing.HEADER // drawing.TWICE, drawing.GAP // drawing.TWICE
    wide, high = (image.shape[1] - 3 * side) // 2, image.shape[0] - top - side
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


def strict(constant):
    raise AssertionError(f"{constant} is no JSON")


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
