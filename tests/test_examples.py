"""The scripts of `examples/` are short and train; the cells of the notebook run in order."""

import contextlib
import io
import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
from ddp_harness import run_ranks

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SHOWN = [path for path in sorted(FOLDER.glob("*.*")) if path.name not in ("README.md", "battles.py")]


def printed(rank, dist, given):
    source, folder = given
    os.chdir(folder)
    os.environ |= {"T_MAX": "600", "MPLBACKEND": "Agg"}
    sys.argv[1:], sys.path[:0] = ["--steps=2"], [str(FOLDER)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source, "example", "exec"), {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.processes
@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_an_example_is_short_and_its_losses_are_finite(path, tmp_path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    (shown,) = run_ranks(printed, (text, str(tmp_path)), world_size=1)
    losses = re.findall(r"(?:loss|win rate) ([\w.-]+)", shown)
    assert losses and all(math.isfinite(float(loss)) for loss in losses) and len(text.splitlines()) <= 60, shown
