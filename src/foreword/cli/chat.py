"""`foreword chat`: a conversation in the terminal, or one turn per line through a pipe.

Earlier turns stay in the cache, so a turn costs only its new tokens. Tokens that were accepted together in one round are
coloured, so that speculation is visible. If a reply is stopped, its turn is dropped from the conversation. At the keyboard
the engine warms up before the first turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.console import (
    complain,
    end_line,
    figures,
    has_colour,
    note,
    note_defaults,
    notes,
    print_json,
    screen,
    waiting,
)
from foreword.cli.options import GenerationOptions, Json, MethodOptions, ModelOptions, Remeasure
from foreword.errors import PromptError

if TYPE_CHECKING:
    from foreword.api import Chat
    from foreword.results import Piece, Result

CHAT_EXAMPLES = """\
[bold]Examples[/]

  foreword chat

  foreword chat --system "You answer in one sentence." --temperature 0.7

  printf 'My name is Ada.\\nWhat is my name?\\n' | foreword chat --json
"""

WARM_UP_TOKENS = 1024  # length of a conversation; rounds of longer ones are recorded when they occur

HELP = """\
/reset  forget the conversation, keep the system message
/stats  show the figures of the session so far
/quit   leave; Ctrl-D does too. Ctrl-C stops a reply and forgets that turn"""


def chat(
    model: ModelOptions,
    method: MethodOptions,
    generation: GenerationOptions,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message that tells the model how to behave. Default: none.")
    ] = None,
    remeasure: Remeasure = False,
    json: Json = False,
) -> None:
    """Chat with a model that remembers the conversation.

    Coloured text was drafted and accepted several tokens at a time; the line under a reply shows tokens per round. Ctrl-C
    stops a reply and forgets that turn; /help lists the commands. In a pipe, each line is a turn; with --json, each turn is
    answered by one JSON object.
    """
    settings = generation.settings(json, max_new_tokens=512)
    with model.load(method, 1, remeasure, generation_config=not generation.no_generation_config) as llm:
        session = ChatSession(llm.chat(system, **settings), json, _at_keyboard())
        if session.is_live:
            with waiting("warming up", terminal_only=True):
                llm.warm_up(min(WARM_UP_TOKENS, llm.engine.max_context), **settings)
            note(f"{llm.model.name} · {llm.method} · /help lists the commands, Ctrl-D leaves")
            note_defaults(llm.sampling_defaults, settings)
        for line in _lines():
            if line == "/quit":
                break
            session.handle(line)


def _at_keyboard() -> bool:
    return sys.stdin.isatty()


def _lines() -> Iterator[str]:
    """Yield what the user types or pipes in, line by line, without blank lines."""
    if not sys.stdin.isatty():
        try:
            yield from filter(None, map(str.strip, sys.stdin))
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not UTF-8 ({error.reason}); convert it") from error
        return
    with suppress(ImportError):  # not on every system; it lets the user edit and recall lines
        import readline  # noqa: F401, PLC0415
    with suppress(EOFError):
        while True:
            if line := input("> " if sys.stdout.isatty() else "").strip():
                yield line
    typer.echo()  # Ctrl-D leaves the cursor after the prompt


@dataclass
class ChatSession:
    """One session: the conversation, and the statistics of its replies."""

    chat: Chat
    json: bool
    is_live: bool
    """Whether a user types at a terminal."""

    replies: list[Result] = field(default_factory=list)

    def handle(self, line: str) -> None:
        """Run a command, or answer a prompt. At the keyboard, a prompt that cannot be used does not end the session."""
        commands: dict[str, Callable[[], None]] = {"/help": self.help, "/reset": self.reset, "/stats": self.stats}
        if line in commands:
            commands[line]()
        elif line.startswith("/") and line[1:].isalpha():
            notes().print(f"there is no command {line}; /help lists the commands")
        else:
            try:
                self.answer(line)
            except PromptError as error:
                if not self.is_live:
                    raise
                complain(error)
                note("/reset forgets the conversation so far")

    def answer(self, line: str) -> None:
        try:
            for piece in self.chat.stream(line):
                self._show(piece)
        except KeyboardInterrupt:  # never inside a step; the conversation stays as it was before the turn
            if not self.is_live:
                raise
            typer.echo()
            note("stopped; this turn is forgotten")
            return
        result = self.chat.last
        self.replies.append(result)
        if self.json:
            print_json({"turn": len(self.replies), "prompt": line, **result.to_dict()})
            return
        end_line(result.text)
        if self.is_live:
            note(figures([result]))

    def _show(self, piece: Piece) -> None:
        if self.json:
            return
        coloured = len(piece.tokens) > 1 and has_colour(screen())
        typer.echo(typer.style(piece, fg="cyan") if coloured else piece, nl=False)

    def help(self) -> None:
        notes().print(HELP, style="dim")

    def reset(self) -> None:
        self.chat.reset()
        notes().print("the conversation starts again", style="dim")

    def stats(self) -> None:
        if not self.replies:
            notes().print("no reply yet", style="dim")
            return
        turns = [reply.stats for reply in self.replies]
        reused, read = sum(one.reused_tokens for one in turns), sum(one.prompt_tokens for one in turns)
        notes().print(figures(self.replies), style="dim")
        notes().print(f"{reused} of {read} prompt tokens were still in the cache", style="dim")
