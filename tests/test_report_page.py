"""`omagd report`: what the page says, compared with other computations; bad input; the page in a browser."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import opened
from many_runs import make_run, make_study
from scipy import stats

from omagd.envs.frames import Scene
from omagd.lab.analysis.run_report import POPULATIONS
from omagd.run.cli.main import main
from omagd.run.recording.recording import Episode, Moment, Recording
from omagd.run.run_folder import is_word

PIXEL = b"\x89PNG\r\n\x1a\n"
EVIL = "<script>alert(1)</script>"


class Words(HTMLParser):
    """Collects the rows of tables, the lines of lists, and all tags."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.lines, self.tags, self._into = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._into = self.rows[-1]
        if tag == "li":
            self.lines.append("")
            self._into = self.lines

    def handle_endtag(self, tag):
        if tag in ("td", "th", "li"):
            self._into = None

    def handle_data(self, data):
        if self._into is not None:
            self._into[-1] = " ".join(f"{self._into[-1]} {data}".split())

    def row(self, first, cells=None):
        return next(row for row in self.rows if row and row[0] == first and cells in (None, len(row)))


def report(folder, *more):
    assert main(["report", str(folder), *more]) == 0
    return Words((folder / "report.html").read_text())


def add(folder, name, value):
    """Change entries of a JSON file of a run."""
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **value}))


def log(folder, *records):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def three_stages(folder, **updates):
    """Write a run with results of all stages."""
    make_run(folder, config="omagd_small", lr=0.004, **updates)
    summary = json.loads((folder / "summary.json").read_text())
    tested = {"test_error": 0.01, "test_ratio_simple": 0.125, "test_ratio_ridge": 1.5, "top1": 0.9, "test_top1": 0.75}
    rows = [
        {"row": name, "count": 7, "mse": {"predictor": error, "zeros": 0.4}}
        for name, error in zip(POPULATIONS, (0.01, 0.0, 0.02, *[0.04] * 7), strict=True)
    ]
    summary["stages"] = {
        "stage1": {"values": {"codes_in_use": 64.0, "perplexity": 32.5, "mse": 0.001},
                   "phases": {"wall": 10.0, "update": 7.5, "collect": 2.5}},
        "stage2": {"values": tested, "phases": {"wall": 20.0, "update": 20.0}, "beliefs": {"rows": rows}},
        "stage3": {"values": {**summary["stages"]["stage3"]["values"], "policy_error": 0.03}},
    }  # fmt: skip
    add(folder, "summary.json", summary)
    log(folder, *({"stage": "stage1", "epoch": t, "eval/mse": 1 / t, "eval/codes_in_use": t} for t in (20, 40)))
    (folder / "plots").mkdir()
    (folder / "plots" / "beliefs.png").write_bytes(PIXEL)
    return folder


def record_battle(folder):
    scene = Scene(("a0", "e0"), (0, 1), ("Marine", "Marine"), ("agents", "enemies"), bounds=(0.0, 0.0, 9.0, 9.0))
    moments = [Moment(x=[2.0, 3.0 + t], y=[4.0, 4.0], alive=[True, True]) for t in range(3)]
    episode = Episode(env="skirmish", map_name="3m", seed=1, policy=EVIL, values="Q-values", results={"return": 1.0},
                      scene=scene, moments=moments)  # fmt: skip
    Recording(episodes=[episode]).write(folder / "replays" / "one.json.gz")


def test_a_run_has_results_reconstruction_times_card_and_differences(tmp_path, capsys):
    folder = three_stages(tmp_path / "run", seed=7)
    page = report(folder)
    assert capsys.readouterr().out.split() == [str(folder / "report.html")]
    assert page.row("win rate")[1:] == ["0.750", "0.750"] and page.row("MSE")[1:] == ["0.001", ""]
    assert ["", *POPULATIONS.values()] in page.rows
    assert page.row("reconstruction")[1:5] == ["0.01", "0", "0.02", "0.04"] and page.row("units")[1:] == ["7"] * 10
    assert page.row("zeros")[1] == "0.400" and page.row("error over ridge regression")[1] == "1.500"
    phases = [row for row in page.rows if row[0] in ("update", "collect")]
    assert phases[:2] == [["update", "8 s", "75.0%"], ["collect", "2 s", "25.0%"]], "the longest first"
    card = json.loads((folder / "card.json").read_text())
    assert page.row("id")[1] == card["id"] and page.row("torch")[1] == card["recorded"]["versions"]["torch"]
    changed = [row for row in page.rows if len(row) == 3 and row[0] in json.loads((folder / "config.json").read_text())]
    assert changed == [["seed", "1", "7"], ["lr", "0.002", "0.004"]] or sorted(changed) == [
        ["lr", "0.002", "0.004"], ["seed", "1", "7"],
    ]  # fmt: skip
    pictures = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) == 2 and base64.b64decode(pictures[0].partition(",")[2])[:8] == PIXEL, "curves and a battle"


def test_without_a_name_the_newest_run_that_trained_is_meant(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("evaluation", "new", "old")):
        folder = make_run(Path("results") / name)
        os.utime(folder / "run.json", (1e9 - age, 1e9 - age))
    add(Path("results/evaluation"), "config.json", {"evaluate": True})
    assert main(["report"]) == 0
    assert capsys.readouterr().out == "results/new/report.html\n"
    Path("results/lr=0.1-3m").mkdir()  # as studies name them
    words = ("with", "lr=0.1", "results/lr=0.1-3m", "results/new")
    assert [is_word(word) for word in words] == [True, True, False, False]


def test_warnings_of_a_run(tmp_path):
    folder = make_run(tmp_path / "run")
    entry = {"kind": "lossy", "from": "checkpoints/3", "t_env": 40, "lost_episodes": 2, "set_aside": "set_aside/x"}
    add(folder, "card.json", {"resumed": [entry]})
    add(folder, "summary.json", {"exit_state": "failed", "restarts": 2})
    log(folder, {"stage": "stage3", "t_env": 9, "skipped_updates": 3, "lost_episodes": 5, "worker_restarts": 0})
    text = "\n".join(report(folder).lines)
    for line in (
        "the run is failed", "started again 2 times", "resumed (lossy)", "checkpoints/3 at 40 steps", "2 episodes lost",
        "set_aside/x", "3 updates skipped", "5 episodes lost",
    ):  # fmt: skip
        assert line in text
    assert "workers" not in text, "what has not happened is no warning"


def test_a_study_has_arms_by_maps_with_intervals_and_all_runs(tmp_path):
    make_study(tmp_path, maps=("3m", "8m"), seeds=(1, 2, 3))
    make_run(tmp_path / "zbegun", (0.1,), finished=False, seed=9, lr=0.005)
    shutil.rmtree(tmp_path / "lr0.0003_8m_seed3")  # so that nothing is paired with it
    page = report(tmp_path)
    cell = page.row("lr=0.001", 3)[1]
    scores = np.array([0.2 + 0.2 + 0.02 * seed for seed in (1, 2, 3)])
    found = stats.ttest_1samp(scores, 0).confidence_interval(0.95)
    middle, low, high, *lead = (float(number) for number in re.findall(r"\d\.\d+", cell))
    assert middle == pytest.approx(scores.mean(), abs=1e-3) and "n = 3" in cell
    assert (low, high) == pytest.approx(tuple(found), abs=1e-3) and lead == [0.2, 1.0], "over the first arm"
    bold = re.findall("<b>(.*?)</b>", (tmp_path / "report.html").read_text())
    low, high = stats.ttest_ind(scores + 0.05, (0.27, 0.29), equal_var=False).confidence_interval(0.95)
    assert len(bold) == 4 and bold[0] == f"+0.210 [{low:.3f}, {high:.3f}]", "the leads on 8m, in win rate and return"
    names = [row[0] for row in page.rows if len(row) == 11]
    assert len(names) == 19 and page.row("zbegun")[4].startswith("unfinished")
    assert page.row("lr", 4) == ["lr", "0.0003", "0.001", "0.005"]
    assert [row[0] for row in page.rows if row[0] == "lr=0.005"], "arms are rows"


def test_an_arm_that_cannot_be_compared_has_an_asterisk_and_a_line(tmp_path):
    for name, steps in (("a", 1000), ("b", 2000)):
        make_run(tmp_path / name, t_max=steps)
    page = report(tmp_path)
    assert [row[0] for row in page.rows if row and row[0].endswith("*")] == ["t_max=2000 *"] * 2, "win rate and return"
    assert any("t_max 2000, not 1000" in line for line in page.lines)


def test_a_damaged_run_is_a_warning_and_jobs_that_failed_are_named(tmp_path, capsys):
    make_study(tmp_path / "runs", rates=(0.001, 0.005))
    for name in ("config.json", "summary.json"):
        (tmp_path / "runs" / "lr0.001_3m_seed2" / name).write_text("{")
    (tmp_path / "runs" / "lr0.005_3m_seed1" / "metrics.jsonl").write_text('{"stage": []}\n{"t_env": "x"}\n[')
    add(tmp_path / "runs" / "lr0.005_3m_seed2", "summary.json", {"stages": {"stage3": {"phases": {"wall": "x"}}}})
    jobs = [{"job": {"name": name, "arm": name[:7]}, "state": "done"} for name in ("lr0.001_3m_seed1",)]
    jobs += [{"job": {"name": "bad", "arm": "x"}, "state": "failed", "error": f"no {EVIL}"}]
    (tmp_path / "study.json").write_text(json.dumps({"jobs": jobs}))
    page = report(tmp_path)
    text = "\n".join(page.lines)
    assert "left out: " in text and "lr0.001_3m_seed2: neither" in text and f"bad: failed: no {EVIL}" in text
    assert "lr0.005_3m_seed1: metrics.jsonl has no record" in text
    assert len([row for row in page.rows if len(row) == 11]) == 4
    assert capsys.readouterr().err.count("\n") <= 1


def test_a_page_says_what_it_cannot_show(tmp_path, monkeypatch):
    folder = three_stages(tmp_path / "run")
    (folder / "replays").mkdir()
    (folder / "replays" / "old.json.gz").write_bytes(b"damaged")
    add(folder, "card.json", {"recorded": {"versions": 3}})
    (folder / "set_aside" / "x").mkdir(parents=True)
    (folder / "plots" / "beliefs.png").write_bytes(PIXEL + bytes(1 << 20))
    text = "\n".join(report(folder).lines)
    for line in ("old.json.gz: is damaged", "card: cannot be shown (TypeError)", "set_aside/ has files"):
        assert line in text
    assert (folder / "report.html").read_text().count("<img") == 1, "without the picture that is too large"
    monkeypatch.setattr("omagd.lab.analysis.run_report.LARGEST_RECORDING", 3)
    assert "1 recordings are too large for this page" in "\n".join(report(folder).lines)
    (folder / "config.json").unlink()
    assert "config.json cannot be read" in report(folder).lines


def test_everything_is_escaped(tmp_path):
    folder = three_stages(tmp_path / EVIL.replace("/", "∕"), name=EVIL, pretrained_tokenizer_path=EVIL)
    record_battle(folder)
    page = report(folder)
    assert [tag for tag, _ in page.tags].count("script") == 1
    (frame,) = [attrs for tag, attrs in page.tags if tag == "iframe"]
    assert EVIL not in frame["srcdoc"] and "<canvas" in frame["srcdoc"]


def test_the_page_in_a_browser(tmp_path):
    folder, sections = three_stages(tmp_path / "run"), {"Results", "Curves", "Card", "Configuration"}
    record_battle(folder)
    report(folder)
    with opened(folder / "report.html", dark=True, wide=390) as (page, complaints):
        assert sections <= set(page.locator("h2").all_text_contents())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("#curves img").first.bounding_box()["width"] > 250
        page.locator("iframe").scroll_into_view_if_needed()
        player = page.frame_locator("iframe")
        player.locator("#next").click()
        player.locator("#clock", has_text="1").wait_for(timeout=20_000)
        assert [line for line in complaints if not line.startswith("data:")] == []
