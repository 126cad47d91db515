"""A trial of every new grammar, in a process that can be killed: a small schema may take hours or all memory to compile.

In: a `GrammarSpec` and a vocabulary. Out: nothing, or an InputError that says why the grammar cannot be used. The process is
started at the first grammar and serves all that follow. What it found is remembered. Where a grammar is used it is compiled
again: that takes as long as this trial, and less than sending the compiled form would.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

from foreword.errors import ForewordError, InputError
from foreword.text.grammar import KINDS, GrammarCompiler, GrammarSpec

COMPILE_S = 10.0  # time limit of one grammar; usual ones take milliseconds
START_S = 120.0  # to start the process; on an idle machine it takes two seconds
MEMORY = 1 << 30  # bytes that compiling may take
REMEMBERED = 256  # grammars
TOO_MUCH = f"needs more than {MEMORY >> 20} MiB to compile; give a smaller one"


class GrammarChecker:
    """Owns the process. Any thread may check; one at a time does."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: OrderedDict[tuple[GrammarSpec, str], str] = OrderedDict()  # what is wrong; empty: nothing
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process id of the parent: a forked child has no part in it
        self._vocabulary: str | None = None  # the one that was sent last

    def check(self, spec: GrammarSpec, vocabulary: str) -> None:
        """Refuse a grammar that cannot be compiled within the limits. `vocabulary`: see `Tokenizer.grammar_vocabulary`."""
        with self._lock:
            key = spec, vocabulary
            if key not in self._found:
                self._found[key] = self._tried(spec, vocabulary)
            self._found.move_to_end(key)
            while len(self._found) > REMEMBERED:
                self._found.popitem(last=False)
            wrong = self._found[key]
        if wrong:
            raise InputError(wrong)

    def _tried(self, spec: GrammarSpec, vocabulary: str) -> str:
        """Compile a grammar in the process, and return what is wrong with it."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._start()
        try:
            if vocabulary is not self._vocabulary:
                self._send("vocabulary", vocabulary)
                self._vocabulary = vocabulary
            self._send(spec.kind, spec.text)
            if self._channel.poll(COMPILE_S):
                return self._channel.recv_bytes().decode()
            wrong = f"{spec.kind} takes more than {COMPILE_S:g} seconds to compile; give a smaller one"
        except (EOFError, OSError):
            wrong = f"{spec.kind} {TOO_MUCH}"
        self.end()
        return wrong

    def _send(self, kind: str, text: str) -> None:
        self._channel.send_bytes(f"{kind}\n{text}".encode())

    def _start(self) -> None:
        self._channel, theirs = Pipe()
        source = str(Path(__file__).parents[2])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "foreword.text.grammar_check", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the parent; a closed channel ends this one
            )
        self._owner, self._vocabulary = os.getpid(), None
        try:
            ready = self._channel.poll(START_S) and self._channel.recv_bytes() == b"ready"
        except (EOFError, OSError):
            ready = False
        if not ready:
            self.end()
            raise ForewordError(
                "the process that compiles grammars does not start; run `python -c 'import xgrammar'` to see why"
            )

    def end(self) -> None:
        """Kill the process. The next grammar starts another one."""
        if self._process is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            self._process = None


CHECKER = GrammarChecker()


def check(spec: GrammarSpec, vocabulary: str) -> None:
    """Refuse a grammar that cannot be compiled within the limits."""
    CHECKER.check(spec, vocabulary)


# In the process ----------------------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Compile what arrives, and answer what is wrong with it, until the channel is closed."""
    import xgrammar  # noqa: F401, PLC0415  takes a second or two, before the time limit counts

    _limit_memory()
    channel, compiler = Connection(descriptor), GrammarCompiler(lambda: "")
    channel.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            kind, _, text = channel.recv_bytes().decode().partition("\n")
            if kind == "vocabulary":
                compiler = GrammarCompiler(lambda text=text: text, keeps=False)  # type: ignore[misc]
            else:
                channel.send_bytes(_wrong(compiler, kind, text).encode())


def _wrong(compiler: GrammarCompiler, kind: str, text: str) -> str:
    spec = GrammarSpec(next(one for one in KINDS if one == kind), text)
    try:
        compiler.compiled(spec)
    except InputError as error:
        return f"{kind} {TOO_MUCH}" if "bad_alloc" in str(error) else str(error)
    except MemoryError:
        return f"{kind} {TOO_MUCH}"
    return ""


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]))
