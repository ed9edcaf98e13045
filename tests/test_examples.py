"""The scripts of `examples/` are short and train; the cells of the notebook run in order."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SHOWN = [path for path in sorted(FOLDER.glob("*.*")) if path.name not in ("README.md", "battles.py")]


@pytest.mark.processes
@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_an_example_is_short_and_its_losses_are_finite(path, tmp_path):
    text, words = path.read_text(encoding="utf-8"), [str(path), "--steps=2"]
    if path.suffix == ".ipynb":
        cells = ("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        text, words = "", ["-c", "\n".join(cells)]
    env = {**os.environ, "T_MAX": "600", "MPLBACKEND": "Agg"}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    losses = re.findall(r"(?:loss|win rate) ([\w.-]+)", done.stdout)
    assert done.returncode == 0 and losses and all(math.isfinite(float(loss)) for loss in losses), done.stderr
    assert len(text.splitlines()) <= 60
