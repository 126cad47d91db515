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
    """Owns the process. Any thread may check; one at a time tries a new grammar."""

    def __init__(self) -> None:
        self._lock, self._memory_lock = Lock(), Lock()
        self._found: OrderedDict[tuple[GrammarSpec, str], str] = OrderedDict()  # what is wrong; empty: nothing
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process id of the parent: a forked child has no part in it
        self._vocabulary: str | None = None  # the one that was sent last

    def check(self, spec: GrammarSpec, vocabulary: str) -> None:
        """Refuse a grammar that cannot be compiled within the limits. `vocabulary`: see `Tokenizer.grammar_vocabulary`."""
        wrong = self._remembered(spec, vocabulary)
        if wrong is None:
            with self._lock:
                wrong = self._remembered(spec, vocabulary)  # another thread may have tried it meanwhile
                if wrong is None:
                    wrong = self._tried(spec, vocabulary)
                    self._remember(spec, vocabulary, wrong)
        if wrong:
            raise InputError(wrong)

    def knows(self, spec: GrammarSpec, vocabulary: str) -> bool:
        """Return whether `check` has its answer at hand, without a trial."""
        return self._remembered(spec, vocabulary) is not None

    def _remembered(self, spec: GrammarSpec, vocabulary: str) -> str | None:
        """Return what was found wrong with a grammar, the empty string if nothing was; None if it was not tried."""
        with self._memory_lock:
            if (spec, vocabulary) not in self._found:
                return None
            self._found.move_to_end((spec, vocabulary))
            return self._found[spec, vocabulary]

    def _remember(self, spec: GrammarSpec, vocabulary: str, wrong: str) -> None:
        with self._memory_lock:
            self._found[spec, vocabulary] = wrong
            while len(self._found) > REMEMBERED:
                self._found.popitem(last=False)

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


def is_checked(spec: GrammarSpec, vocabulary: str) -> bool:
    """Return whether `check` answers at once, because this grammar was tried before."""
    return CHECKER.knows(spec, vocabulary)


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
