"""install_sc2.sh with a server on this machine: complete, resumable, checked; errors are one line."""

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
pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(NOT_HERE), reason=f"not installed: {NOT_HERE}")]


class Files(http.server.BaseHTTPRequestHandler):
    """Serves `server.files`, with ranges; records the requests."""

    def do_GET(self):
        body, wanted = self.server.files[self.path], self.headers.get("Range", "")
        self.server.asked.append((self.path, wanted))
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted and self.server.ranges else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:])

    def log_message(self, *args):
        pass


def archive(folder: Path, build: int = 75689) -> bytes:
    game = folder / f"zip{build}" / "StarCraftII" / "Versions" / f"Base{build}"
    game.mkdir(parents=True)
    (game / "SC2_x64").write_text("#!/bin/sh\n")
    (game / "data").write_bytes(os.urandom(20000))
    packed = ["zip", "-q", "-r", "-P", PASSWORD, f"../{build}.zip", "StarCraftII"]
    subprocess.run(packed, cwd=folder / f"zip{build}", check=True)
    return (folder / f"{build}.zip").read_bytes()


class Site:
    """Files of a game and two maps for a server, and a copy of the script with a list of their checksums."""

    def __init__(self, server: http.server.HTTPServer, folder: Path) -> None:
        self.server, self.home, self.repo = server, folder / "home", folder / "repo"
        self.home.mkdir()
        (self.repo / "scripts").mkdir(parents=True)
        for name in ("install_sc2.sh", "scripts/lib.sh"):
            shutil.copy(ROOT / name, self.repo / name)
        self.maps = {f"/oxwhirl/smac/x/{name}.SC2Map": name.encode() * 100 for name in ("3m", "8m")}
        lines = [f"{hashlib.sha256(body).hexdigest()} {len(body)} {path[1:]}" for path, body in self.maps.items()]
        (self.repo / "scripts" / "sc2_maps.txt").write_text("\n".join(["# maps", *lines]) + "\n")
        self.listed = self.repo / "scripts" / "sc2_archives.txt"
        self.listed.write_text(f"# of another game\n{'0' * 64} SC2.zip\n")
        self.body = archive(folder)
        self.total = hashlib.sha256(self.body).hexdigest()
        server.files, server.asked, server.ranges = {**self.maps, "/SC2.4.10.zip": self.body}, [], True
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.game = self.home / "StarCraftII"
        self.program = self.game / "Versions" / "Base75689" / "SC2_x64"

    def install(self, *options: str, url: str = "", **variables: str) -> subprocess.CompletedProcess:
        """Run the script; with the password if there are no options."""
        url, options = url or self.url, options or ("--password", PASSWORD)
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "SC2_GAME_URL": url, "SC2_MAPS_URL": url}
        command = ["bash", str(self.repo / "install_sc2.sh"), *filter(None, options)]
        return subprocess.run(
            command, env=env | variables, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )

    def rejected(self, code: int, *words: str, options: tuple[str, ...] = (), **how: str) -> list[str]:
        """Run the script and return its messages, which hold these words; it must end with that exit code."""
        done = self.install(*options, **how)
        assert done.returncode == code and [word for word in words if word not in done.stderr] == [], done.stderr
        return done.stderr.splitlines()


@pytest.fixture
def site(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield Site(server, tmp_path)
        server.shutdown()


def test_game_and_maps_are_downloaded_once(site):
    done = site.install()
    assert done.returncode == 0, done.stderr
    assert os.access(site.program, os.X_OK)
    assert (site.game / "Maps" / "SMAC_Maps" / "3m.SC2Map").read_bytes() == site.maps["/oxwhirl/smac/x/3m.SC2Map"]
    assert site.total in done.stdout
    asked = len(site.server.asked)
    again = site.install("")
    assert again.returncode == 0 and len(site.server.asked) == asked and "2 were there" in again.stdout
    assert [path.name for path in site.home.iterdir()] == ["StarCraftII"]


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_resumes(site, ranges):
    site.server.ranges = ranges
    (site.home / "StarCraftII.SC2.4.10.zip.part").write_bytes(site.body[:7000])
    done = site.install()
    assert done.returncode == 0, done.stderr
    assert site.server.asked[0] == ("/SC2.4.10.zip", "bytes=7000-") and site.program.is_file()


def test_maps_only_replaces_a_wrong_map_and_keeps_a_copy(site):
    folder = site.home / "SC2" / "Maps" / "SMAC_Maps"
    folder.mkdir(parents=True)
    (folder / "8m.SC2Map").write_bytes(b"another")
    done = site.install("--maps-only", SC2PATH=str(site.home / "SC2"))
    assert done.returncode == 0 and "export SC2PATH" in done.stdout
    assert (folder / "8m.SC2Map").read_bytes() == site.maps["/oxwhirl/smac/x/8m.SC2Map"]
    assert (folder / "8m.SC2Map.old").read_bytes() == b"another"


def test_mistakes_and_network_errors_are_one_line(site):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        (line,) = site.rejected(3, "connect", options=("--maps-only",), url=url)
        assert line.startswith(f"error: cannot fetch {url}")
    for options, words in (
        (("--verison", "4.10"), ("--verison", "--help")), (("--version", "5.0"), ("5.0", "4.10", "4.6.2")),
        (("",), ("license", "--password")),
    ):  # fmt: skip
        assert len(site.rejected(2, *words, options=options)) == 1
    assert site.server.asked == []


def test_wrong_files_are_rejected(site):
    assert len(site.rejected(4, "sha256", options=("--password", PASSWORD, "--sha256", "0" * 64))) == 2
    site.rejected(4, "password", options=("--password", "no"))
    site.listed.write_text(f"# somebody\n{'1' * 64} SC2.4.10.zip\n")
    lines = site.rejected(4, f"not {'1' * 64} (scripts/sc2_archives.txt)", f"--sha256 {site.total}")
    assert len(lines) == 1 and not site.game.exists()
    site.server.files = {path: body + b"!" for path, body in site.maps.items()}
    site.rejected(4, "published", options=("--maps-only",))
    assert not list(site.game.rglob("*.SC2Map"))


def test_checksums_of_the_first_installation_are_recorded_and_checked_later(site):
    """The archive when it is downloaded again, the program at every call; --sha256 accepts another archive."""
    own, record = hashlib.sha256(b"#!/bin/sh\n").hexdigest(), site.game / "omagd_sha256.txt"
    assert f"archive sha256 {site.total}, recorded" in site.install().stdout
    wanted = [f"{site.total}  SC2.4.10.zip", f"{own}  Versions/Base75689/SC2_x64"]
    assert record.read_text().splitlines() == wanted
    site.program.write_text("#!/bin/sh\necho another\n")
    assert len(site.rejected(4, f"not {own}", options=("",))) == 1
    shutil.rmtree(site.game / "Versions")
    other = site.server.files["/SC2.4.10.zip"] = site.body + b"\0"
    site.rejected(4, f"not {site.total} ({record}, recorded")
    assert not site.program.exists()
    total = hashlib.sha256(other).hexdigest()
    done = site.install("--password", PASSWORD, "--sha256", total)
    assert done.returncode == 0, done.stderr
    assert f"{total}  SC2.4.10.zip" in record.read_text() and site.install("").returncode == 0
    shutil.rmtree(site.game)
    site.listed.write_text(f"{total} SC2.4.10.zip\n")
    assert f"{total}, equal to scripts/sc2_archives.txt" in site.install().stdout


def test_a_second_version_needs_its_own_folder(site, tmp_path):
    site.server.files["/SC2.4.6.2.69232.zip"] = archive(tmp_path, 69232)
    site.program.parent.mkdir(parents=True)
    options = ("--version", "4.6.2", "--password", PASSWORD)
    site.rejected(2, "SC2PATH=", options=options)
    assert site.install(*options, SC2PATH=str(site.home / "other")).returncode == 0
    assert (site.home / "other" / "Versions" / "Base69232" / "SC2_x64").is_file()
