"""`foreword chat`: a conversation in the terminal, or one turn a line through a pipe.

Earlier turns stay in the cache, so a turn costs what is new in it. Pieces of more than one token were guessed and found
right in one pass: they are coloured, so that speculation can be seen at work. A reply that is stopped is forgotten,
together with what was asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.console import complain, end_line, figures, has_colour, note, notes, print_json, screen
from foreword.cli.options import Json, MethodOptions, ModelOptions, WritingOptions
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

HELP = """\
/reset  forget the conversation, keep the system message
/stats  figures of the session so far
/quit   leave; so does Ctrl-D. Ctrl-C stops a reply, and forgets that turn"""


def chat(
    model: ModelOptions,
    method: MethodOptions,
    writing: WritingOptions,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="Say first how the model should behave.")] = None,
    json: Json = False,
) -> None:
    """Talk with a model that remembers the conversation.

    Coloured words were guessed several tokens at a time and found right in one pass; the line under a reply tells how
    many tokens a pass brought. Ctrl-C stops a reply and forgets that turn; /help lists the commands. In a pipe, each line
    is a turn; with --json, each turn is answered by one JSON object.
    """
    settings = writing.settings(json, max_new_tokens=512)
    with model.load(method, slots=1) as llm:
        talk = Talk(llm.chat(system, **settings), json, sys.stdin.isatty())
        if talk.is_live:
            note(f"{llm.model.name} · {llm.method} · /help lists the commands, Ctrl-D leaves")
        for line in _lines():
            if line == "/quit":
                break
            talk.hear(line)


def _lines() -> Iterator[str]:
    """What the user says, line by line: typed at a prompt, or piped in. Blank lines say nothing."""
    if not sys.stdin.isatty():
        try:
            yield from filter(None, map(str.strip, sys.stdin))
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not UTF-8 ({error.reason}); convert it") from error
        return
    with suppress(ImportError):  # not everywhere; with it, lines can be edited and called back
        import readline  # noqa: F401, PLC0415
    with suppress(EOFError):
        while True:
            if line := input("> " if sys.stdout.isatty() else "").strip():
                yield line
    typer.echo()  # Ctrl-D leaves the cursor behind the prompt


@dataclass
class Talk:
    """One session: the conversation, and what its replies cost."""

    chat: Chat
    json: bool
    is_live: bool
    """Somebody sits at the keyboard."""

    replies: list[Result] = field(default_factory=list)

    def hear(self, line: str) -> None:
        """A command, or something to answer. At the keyboard, a prompt that cannot be used does not end the session."""
        commands: dict[str, Callable[[], None]] = {"/help": self.help, "/reset": self.reset, "/stats": self.stats}
        if line in commands:
            commands[line]()
        elif line.startswith("/") and line[1:].isalpha():
            notes().print(f"there is no {line}; /help lists the commands")
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
        except KeyboardInterrupt:  # never inside a step; the reply is given up, the conversation as it was before the turn
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
        guessed = len(piece.tokens) > 1 and has_colour(screen())
        typer.echo(typer.style(piece, fg="cyan") if guessed else piece, nl=False)

    def help(self) -> None:
        notes().print(HELP, style="dim")

    def reset(self) -> None:
        self.chat.reset()
        notes().print("the conversation begins anew", style="dim")

    def stats(self) -> None:
        if not self.replies:
            notes().print("no reply yet", style="dim")
            return
        turns = [reply.stats for reply in self.replies]
        reused, read = sum(one.reused_tokens for one in turns), sum(one.prompt_tokens for one in turns)
        notes().print(figures(self.replies), style="dim")
        notes().print(f"{reused} of {read} prompt tokens were still in the cache", style="dim")
