"""install_sc2.sh against a server on this machine: whole, resumable, checked, and one line when the network says no."""

from __future__ import annotations

import hashlib
import http.server
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PASSWORD = "iagreetotheeula"
LIST = [line.split() for line in (ROOT / "scripts" / "sc2_maps.txt").read_text().splitlines() if line[0] != "#"]
NOT_HERE = [name for name in ("curl", "unzip", "zip", "sha256sum") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(NOT_HERE), reason=f"not installed: {NOT_HERE}"),
]


class Files(http.server.BaseHTTPRequestHandler):
    """Serves `server.files` and understands ranges; notes what was asked for."""

    def do_GET(self):
        body, start = self.server.files.get(self.path), 0
        wanted = self.headers.get("Range", "")
        self.server.asked.append((self.path, wanted))
        if body is None:
            return self.send_error(404)
        if wanted.startswith("bytes=") and self.server.ranges:
            start = int(wanted[6:].split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:])
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    server.files, server.asked, server.ranges = {}, [], True
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def repository(tmp_path):
    """A copy of what the script needs, with a list of two maps whose content we know."""
    (tmp_path / "repo" / "scripts").mkdir(parents=True)
    for name in ("install_sc2.sh", "scripts/lib.sh"):
        shutil.copy(ROOT / name, tmp_path / "repo" / name)
    maps = {f"/oxwhirl/smac/x/{name}.SC2Map": name.encode() * 100 for name in ("3m", "8m")}
    lines = [f"{hashlib.sha256(body).hexdigest()} {len(body)} {path[1:]}" for path, body in maps.items()]
    (tmp_path / "repo" / "scripts" / "sc2_maps.txt").write_text("\n".join(["# maps", *lines]) + "\n")
    (tmp_path / "repo" / "scripts" / "sc2_archives.txt").write_text(f"# of another game\n{'0' * 64} SC2.zip\n")
    return tmp_path / "repo", maps


def archive(folder: Path, build: int = 75689) -> bytes:
    game = folder / "zip" / "StarCraftII" / "Versions" / f"Base{build}"
    game.mkdir(parents=True)
    (game / "SC2_x64").write_text("#!/bin/sh\n")
    (game / "data").write_bytes(os.urandom(20000))
    packed = ["zip", "-q", "-r", "-P", PASSWORD, "../game.zip", "StarCraftII"]
    subprocess.run(packed, cwd=folder / "zip", check=True)
    return (folder / "game.zip").read_bytes()


def install(repo: Path, url: str, home: Path, *options: str, **variables: str) -> subprocess.CompletedProcess:
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "SC2_GAME_URL": url, "SC2_MAPS_URL": url, **variables}
    command = ["bash", str(repo / "install_sc2.sh"), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def test_game_and_maps_are_fetched_once(server, repository, tmp_path):
    repo, maps = repository
    server.files = {**maps, "/SC2.4.10.zip": archive(tmp_path)}
    done = install(repo, server.url, tmp_path, "--password", PASSWORD)
    assert done.returncode == 0, done.stderr
    game = tmp_path / "StarCraftII"
    assert os.access(game / "Versions" / "Base75689" / "SC2_x64", os.X_OK)
    assert (game / "Maps" / "SMAC_Maps" / "3m.SC2Map").read_bytes() == maps["/oxwhirl/smac/x/3m.SC2Map"]
    assert hashlib.sha256(server.files["/SC2.4.10.zip"]).hexdigest() in done.stdout
    asked = len(server.asked)
    again = install(repo, server.url, tmp_path)
    assert again.returncode == 0 and len(server.asked) == asked and "2 were there" in again.stdout
    left = {path.name for path in tmp_path.iterdir()} - {"repo", "zip", "game.zip"}
    assert left == {"StarCraftII"}


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_broke_off_goes_on(server, repository, tmp_path, ranges):
    repo, maps = repository
    body = archive(tmp_path)
    server.files, server.ranges = {**maps, "/SC2.4.10.zip": body}, ranges
    (tmp_path / "StarCraftII.SC2.4.10.zip.part").write_bytes(body[:7000])
    done = install(repo, server.url, tmp_path, "--password", PASSWORD)
    assert done.returncode == 0, done.stderr
    assert server.asked[0] == ("/SC2.4.10.zip", "bytes=7000-")
    assert (tmp_path / "StarCraftII" / "Versions" / "Base75689" / "SC2_x64").is_file()


def test_maps_only_mends_a_wrong_map_and_keeps_it(server, repository, tmp_path):
    repo, maps = repository
    server.files = maps
    folder = tmp_path / "SC2" / "Maps" / "SMAC_Maps"
    folder.mkdir(parents=True)
    (folder / "8m.SC2Map").write_bytes(b"another")
    done = install(repo, server.url, tmp_path, "--maps-only", SC2PATH=str(tmp_path / "SC2"))
    assert done.returncode == 0 and "export SC2PATH" in done.stdout
    assert (folder / "8m.SC2Map").read_bytes() == maps["/oxwhirl/smac/x/8m.SC2Map"]
    assert (folder / "8m.SC2Map.old").read_bytes() == b"another"


def test_when_the_network_says_no_there_is_one_line(repository, tmp_path):
    repo, _ = repository
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        done = install(repo, f"http://127.0.0.1:{nobody.getsockname()[1]}", tmp_path, "--maps-only")
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: cannot fetch http://127.0.0.1") and "connect" in line


def test_wrong_files_are_refused(server, repository, tmp_path):
    repo, maps = repository
    server.files = {**maps, "/SC2.4.10.zip": archive(tmp_path)}
    done = install(repo, server.url, tmp_path, "--password", PASSWORD, "--sha256", "0" * 64)
    assert done.returncode == 4 and len(done.stderr.splitlines()) == 2 and "sha256" in done.stderr
    done = install(repo, server.url, tmp_path, "--password", "no")
    assert done.returncode == 4 and "password" in done.stderr
    assert not (tmp_path / "StarCraftII").exists()
    server.files = {path: body + b"!" for path, body in maps.items()}
    done = install(repo, server.url, tmp_path, "--maps-only")
    assert done.returncode == 4 and "published" in done.stderr
    assert not list((tmp_path / "StarCraftII").rglob("*.SC2Map"))


def test_the_archive_must_be_the_published_one(server, repository, tmp_path):
    repo, maps = repository
    body = archive(tmp_path)
    server.files = {**maps, "/SC2.4.10.zip": body}
    total, listed = hashlib.sha256(body).hexdigest(), repo / "scripts" / "sc2_archives.txt"
    listed.write_text(f"# somebody\n{'1' * 64} SC2.4.10.zip\n")
    done = install(repo, server.url, tmp_path, "--password", PASSWORD)
    assert done.returncode == 4 and len(done.stderr.splitlines()) == 2
    assert f"not {'1' * 64} (scripts/sc2_archives.txt)" in done.stderr and f"--sha256 {total}" in done.stderr
    assert not (tmp_path / "StarCraftII").exists()
    listed.write_text(f"{total} SC2.4.10.zip\n")
    done = install(repo, server.url, tmp_path, "--password", PASSWORD)
    assert done.returncode == 0 and f"{total}, equal to scripts/sc2_archives.txt" in done.stdout


def test_what_was_installed_first_is_recorded_and_checked_afterwards(server, repository, tmp_path):
    """The archive when it is fetched again, the program at every call; --sha256 accepts another archive."""
    repo, maps = repository
    body = archive(tmp_path)
    server.files = {**maps, "/SC2.4.10.zip": body}
    game, total = tmp_path / "StarCraftII", hashlib.sha256(body).hexdigest()
    program = game / "Versions" / "Base75689" / "SC2_x64"
    done = install(repo, server.url, tmp_path, "--password", PASSWORD)
    assert f"archive sha256 {total}, recorded" in done.stdout
    own = hashlib.sha256(program.read_bytes()).hexdigest()
    wanted = [f"{total}  SC2.4.10.zip", f"{own}  Versions/Base75689/SC2_x64"]
    assert (game / "omagd_sha256.txt").read_text().splitlines() == wanted
    program.write_text("#!/bin/sh\necho another\n")
    done = install(repo, server.url, tmp_path)
    assert done.returncode == 4 and f"not {own}" in done.stderr and len(done.stderr.splitlines()) == 1
    shutil.rmtree(game / "Versions")
    other = server.files["/SC2.4.10.zip"] = body + b"\0"
    done = install(repo, server.url, tmp_path, "--password", PASSWORD)
    assert done.returncode == 4 and f"not {total} ({game}/omagd_sha256.txt, recorded" in done.stderr
    assert not program.exists()
    sum_of_other = hashlib.sha256(other).hexdigest()
    done = install(repo, server.url, tmp_path, "--password", PASSWORD, "--sha256", sum_of_other)
    assert done.returncode == 0, done.stderr
    assert f"{sum_of_other}  SC2.4.10.zip" in (game / "omagd_sha256.txt").read_text()
    assert install(repo, server.url, tmp_path).returncode == 0


def test_the_shipped_list_names_its_sources():
    lines = (ROOT / "scripts" / "sc2_archives.txt").read_text().splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if not line.startswith("#"):
            total, name = line.split()
            assert len(bytes.fromhex(total)) == 32 and name in {"SC2.4.10.zip", "SC2.4.6.2.69232.zip"}
            assert before.startswith("# https://")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--verison", "4.10"], ["--verison", "--help"]),
        (["--version", "5.0"], ["5.0", "4.10", "4.6.2"]),
        ([], ["license", "--password"]),
    ],
)
def test_mistakes_are_one_line(server, repository, tmp_path, options, words):
    done = install(repository[0], server.url, tmp_path, *options)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and server.asked == []
    assert [word for word in words if word not in done.stderr] == []


def test_a_second_version_gets_a_folder_of_its_own(server, repository, tmp_path):
    repo, maps = repository
    server.files = {**maps, "/SC2.4.6.2.69232.zip": archive(tmp_path, 69232)}
    (tmp_path / "StarCraftII" / "Versions" / "Base75689").mkdir(parents=True)
    options = ("--version", "4.6.2", "--password", PASSWORD)
    refused = install(repo, server.url, tmp_path, *options)
    assert refused.returncode == 2 and "SC2PATH=" in refused.stderr
    assert install(repo, server.url, tmp_path, *options, SC2PATH=str(tmp_path / "other")).returncode == 0
    assert (tmp_path / "other" / "Versions" / "Base69232" / "SC2_x64").is_file()


def test_every_map_has_its_checksum():
    from omagd.envs.battle.maps import MAPS

    listed = [Path(place).stem for _, _, place in LIST]
    assert len(set(listed)) == len(listed) and set(MAPS) <= set(listed) and "32x32_flat" in listed
    assert all(len(total) == 64 and int(size) > 10000 for total, size, _ in LIST)
