"""Files from others run nothing, whatever stands in them; secrets stay where the user has put them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from command_budgets import BUDGETS
from command_harness import FORKED, MAIN, PYTHON, ROOT, Started, run_folders
from sockets import living

from omagd.components.episode_codec import MARK, read_episodes
from omagd.run.checkpoint.weights import load_file
from omagd.run.cli.main import main
from omagd.utils.errors import UserError

FOLDERS = ("src", "scripts", "benchmarks", "examples", "research")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
OWN_RESULTS = "two_ranks.py"  # of the benchmarks: what its own processes have measured
SECRETS = {
    "WANDB_API_KEY": "5ec2e7000000000000000000000000000000cafe",
    "NETRC": "5ec2e7111111111111111111111111111111cafe",
    "SACRED_MONGO_URL": "mongodb://me:5ec2e7222222@db.example.org/runs",
    "GITHUB_TOKEN": "ghp_5ec2e7333333333333333333333333",
}


class Hostile:
    """Unpickled, it would make a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def saved(content: object, **how: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **how)
    return stream.getvalue()


def test_nothing_lets_a_file_run_something():
    """Ruff rejects pickle, eval and unsafe YAML (pyproject.toml); these words would allow the same."""
    words = re.compile(
        r"weights_only=False|torch\.load\((?!.*weights_only=True)|torch\.jit\.load|joblib|allow_pickle=True"
        r"|add_safe_globals|\b(unsafe|full)_load\b"
    )
    assert [path.name for path in SOURCES if words.search(path.read_text(encoding="utf-8"))] == [OWN_RESULTS]


def test_a_weights_file_runs_nothing(tmp_path):
    file, marker = tmp_path / "agent.th", tmp_path / "marker"
    plain, hidden = pickle.dumps(Hostile(marker)), {"weights": torch.ones(3), "hidden": Hostile(marker)}
    legacy = saved(hidden, _use_new_zipfile_serialization=False)
    for content in (plain, saved(hidden), legacy, saved([1, 2]), promising_more(saved({"x": torch.zeros(4)}))):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"checkpoint_path=.*cannot be read \(agent\.th: "):
            load_file(file, "checkpoint_path")
    assert not marker.exists()
    pickle.loads(plain)
    assert marker.exists(), "the files of this test are hostile"


def promising_more(weights: bytes) -> bytes:
    """Return a small file that names more numbers than it holds: no memory must be made for them."""
    source, out = zipfile.ZipFile(io.BytesIO(weights)), io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for entry in source.infolist():
            # In the pickle 4 numbers become 2^30.
            target.writestr(entry.filename, source.read(entry).replace(b"K\x04", b"J\x00\x00\x00\x40"))
    return out.getvalue()


def episode_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return MARK + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text + data


def archive(**arrays: object) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


GOOD = {"version": 1, "facts": {}, "rows": [2], "fields": []}
FIELD = {"name": "x", "dtype": "float32", "shape": [2], "sha256": hashlib.sha256(bytes(16)).hexdigest()}
WRONG_HEADERS = (b"no JSON", b"\xff\xfe", b"[" * 100_000, [1, 2], {**GOOD, "facts": None}, {**GOOD, "rows": None})
WRONG_FIELDS = (
    {"shape": [-1, -2]}, {"shape": [2.0]}, {"shape": "ab"}, {"dtype": "object"}, {"dtype": ["f4", "O"]},
    {"name": ["x"]}, {"sha256": None}, {"sha256": "0" * 64},
)  # fmt: skip
WRONG_FILES = (
    pickle.dumps({"a": 1}), MARK, MARK + (1 << 62).to_bytes(8, "little") + bytes(40), *map(episode_file, WRONG_HEADERS),
    *(episode_file({**GOOD, "rows": rows, "fields": [FIELD]}, bytes(16)) for rows in ([10**18], [2.0], [True, 1])),
    *(episode_file({**GOOD, "fields": [{**FIELD, **wrong}]}, bytes(16)) for wrong in WRONG_FIELDS),
    episode_file({**GOOD, "fields": [7]}, bytes(16)),
    episode_file({**GOOD, "rows": [0], "fields": [{**FIELD, "sha256": hashlib.sha256(b"").hexdigest()}]}),
    episode_file({**GOOD, "fields": [{**FIELD, "shape": [0, 10**30]}]}),
    episode_file({**GOOD, "fields": [{name: FIELD[name] for name in ("name", "dtype", "shape")}]}, bytes(16)),
    archive(), archive(about="no JSON", rows=[2]), archive(about="{}", rows=[2]), archive(about=np.array([{}], object)),
)  # fmt: skip


@pytest.mark.parametrize("content", WRONG_FILES, ids=range(len(WRONG_FILES)))
def test_a_wrong_episode_file_is_one_line(tmp_path, content):
    (tmp_path / "a").write_bytes(episode_file({**GOOD, "fields": [FIELD]}, bytes(16)))
    (episode,) = read_episodes(tmp_path / "a", {}, "pretrain_buffer_path", 9)
    assert episode["x"].tolist() == np.zeros((2, 2)).tolist()
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match="pretrain_buffer_path="):
        read_episodes(tmp_path / "a", {}, "pretrain_buffer_path", 10**20)


@pytest.mark.parametrize("words", [["-m", SECRETS["SACRED_MONGO_URL"]], [f"--mongo_db={SECRETS['SACRED_MONGO_URL']}"]])
def test_an_address_with_a_password_is_refused_and_not_repeated(capsys, words):
    assert main([*words, "with", "t_max=100"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1 and "5ec2e7" not in text


@pytest.mark.processes
def test_secrets_reach_no_file_and_no_command_line(tmp_path):
    netrc, work = tmp_path / ".netrc", tmp_path / "work"
    netrc.write_text(f"machine api.wandb.ai login user password {SECRETS['NETRC']}\n")
    netrc.chmod(0o600)
    work.mkdir()
    words = "--config=qmix --env-config=matrix_game with run=ddp world_size=2 use_wandb=True use_tensorboard=True"
    command = [PYTHON, MAIN, *words.split(), *BUDGETS, "checkpoint_interval=0"]
    compiled = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # another HOME has no kernels yet
    places = {"NETRC": str(netrc), "HOME": str(tmp_path), "XDG_CACHE_HOME": compiled}
    started = Started(command, work, **{**SECRETS, **places, **FORKED})
    seen: set[bytes] = set()
    until = time.monotonic() + 120
    while started.process.poll() is None and time.monotonic() < until:
        seen |= {process.line for process in living().values()}
        time.sleep(0.2)
    ended = started.wait(5)
    assert ended.code == 0, ended.text
    assert any(b"wandb" in line for line in seen)
    (folder,) = run_folders(work)
    assert list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    texts = {str(path): path.read_bytes() for path in work.rglob("*") if path.is_file()}
    texts |= {"output": ended.text.encode(), "command lines": b"\n".join(seen)}
    assert [name for name, text in texts.items() if b"5ec2e7" in text] == []
