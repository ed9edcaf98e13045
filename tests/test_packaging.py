"""Installing the package: an editable install that editors can follow, and a wheel that has all files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Return a folder named `omagd` with a copy of the files that a build reads."""
    folder = tmp_path_factory.mktemp("parent") / "omagd"
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def python(clone, tmp_path_factory):
    """Return a function that runs Python in a new environment with an editable install of the clone."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # It sees the packages of the present environment, but not its `.pth` files and so not its omagd.
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str | Path, cwd: Path = clone) -> str:
        command = [str(venv / "bin" / "python"), *map(str, words)]
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(*PIP, "install", *OFFLINE, "-e", clone)
    run.site = site
    return run


LEAN = """
import sys
for name in ("wandb", "tensorboard", "pysc2", "s2clientprotocol", "websocket", "absl"):
    sys.modules[name] = None  # not installed
from omagd.run.cli.main import main
logs = main("--config=qmix --env-config=sc2 with use_wandb=True use_tensorboard=True".split())
print(logs, main("--unobserved --config=qmix --env-config=matrix_game with t_max=32 test_nepisode=4".split()))
"""


def test_without_the_extra_full_a_run_trains_and_logs_name_the_extra(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAN], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "2 0", done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    needed = ["use_wandb=True needs wandb", "use_tensorboard=True needs tensorboard", "StarCraft II needs pysc2, "]
    assert len(errors) == 3 and all('pip install "omagd[full]"' in line for line in errors)
    assert [text for text in needed if not any(text in line for line in errors)] == []


def test_an_editable_install_names_a_folder_that_holds_the_package(python, clone):
    """Editors and type checkers follow a path in a `.pth` file, but no import hook; new files are found at once."""
    lines = [line for file in python.site.glob("__editable__*.pth") for line in file.read_text().splitlines()]
    assert lines == [str(clone / ".package")]
    assert (Path(lines[0]) / "omagd" / "py.typed").is_file()
    (clone / "src" / "added.py").touch()
    python("-c", "import omagd.added")
    (clone / "src" / "added.py").unlink()


def test_a_clone_named_omagd_in_the_current_folder_hides_nothing(python, clone, tmp_path):
    """A folder without `__init__.py` is a namespace package, which must not be found before the installed one."""
    show = "import omagd.utils.registry as module; print(module.__file__)"
    for folder in (clone.parent, clone, clone / "src", tmp_path):
        assert python("-c", show, cwd=folder).strip() == str(clone / "src" / "utils" / "registry.py")


def test_a_wheel_has_every_file_of_the_source(python, clone, tmp_path):
    python(*PIP, "wheel", *OFFLINE, "--wheel-dir", tmp_path, clone)
    (wheel,) = tmp_path.glob("omagd-*.whl")
    packed = {name.removeprefix("omagd/") for name in zipfile.ZipFile(wheel).namelist() if name.startswith("omagd/")}
    files = {path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file()}
    assert packed == {str(path) for path in files if "__pycache__" not in path.parts}
