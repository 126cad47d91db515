"""The commands as a person sees them: in a pseudo-terminal, with colour, a prompt and Ctrl-C."""

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import foreword

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    def __init__(self, pid: int, handle: int) -> None:
        self.pid, self.handle, self.shown = pid, handle, ""

    def type(self, keys: bytes) -> None:
        os.write(self.handle, keys)

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Return and consume the output up to and including `text`."""
        limit = time.monotonic() + seconds
        while text not in self.shown and time.monotonic() < limit and self._read():
            pass
        assert text in self.shown, f"{text!r} did not appear in {self.shown!r}"
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def wait_for_more(self) -> None:
        while not self.shown:
            assert self._read()

    def wait(self) -> int:
        """Return the exit status. A process that does not end is killed, which shows in its status."""
        limit = time.monotonic() + 60
        while self._read() and time.monotonic() < limit:
            pass
        while time.monotonic() < limit:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        if not select.select([self.handle], [], [], 60)[0]:
            return False
        try:
            piece = os.read(self.handle, 4096)
        except OSError:  # the other side has closed
            return False
        self.shown += piece.decode(errors="replace")
        return bool(piece)


@contextmanager
def terminal(*args: object, **environment: str) -> Iterator[Terminal]:
    source = str(Path(foreword.__file__).parents[1])
    variables = os.environ | {"PYTHONPATH": source, "TERM": "xterm", "OMP_NUM_THREADS": "1"} | environment
    line = [sys.executable, "-m", "foreword", *map(str, args)]
    pid, handle = pty.fork()
    if pid == 0:
        os.execve(line[0], line, variables)
    try:
        yield Terminal(pid, handle)
    finally:
        os.close(handle)  # hangs up, which ends a running process


def test_generate_streams_and_ends_with_figures(tiny_model):
    asked = ("--model", tiny_model, "--max-new-tokens", 8, "--ignore-eos", "--method", "prompt_lookup")
    with terminal("generate", "hello", *asked) as screen:
        shown = screen.wait_for("prompt_lookup")
        assert screen.wait() == 0
    assert re.search(r"\x1b\[2m8 tokens, the limit of --max-new-tokens · [\d.]+ tokens/round · [\d.]+ tokens/s", shown)


def test_chat_stops_a_reply_and_continues(tiny_model):
    # Fixed rows in a long output: some draft tokens are right, so some pieces have several tokens.
    asked = ("--model", tiny_model, "--max-new-tokens", 450, "--ignore-eos", "--method", "prompt_lookup", "--rows", 4)
    with terminal("chat", *asked) as screen:
        screen.wait_for("/help lists the commands")
        screen.wait_for("> ")
        screen.type(b"hello\n")
        screen.wait_for("hello\r\n")
        screen.wait_for_more()
        screen.type(CTRL_C)
        screen.wait_for("stopped; this turn is forgotten")
        screen.type(b"hello again\n")
        reply = screen.wait_for("tokens/round")
        assert COLOUR.search(reply)
        screen.wait_for("> ")
        screen.type(CTRL_D)
        assert screen.wait() == 0


def test_ctrl_c_at_the_prompt_leaves_without_colour_or_traceback(tiny_model):
    with terminal("chat", "--model", tiny_model, NO_COLOR="1") as screen:
        shown = screen.wait_for("> ")
        time.sleep(1)  # the prompt is shown a moment before it listens
        screen.type(CTRL_C)
        assert screen.wait() == 130
    assert "Traceback" not in shown + screen.shown
    assert not COLOUR.search(shown)
