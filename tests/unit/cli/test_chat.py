"""A conversation through a pipe, its commands, and Ctrl-C during a reply."""

import json
import signal

import pytest

import foreword
from foreword.cli.chat import ChatSession
from foreword.engine.ctrl_c import DelayedCtrlC
from foreword.engine.engine import Engine

SHORT = ("--max-new-tokens", 6, "--ignore-eos")


@pytest.fixture
def llm(tiny_model):
    with foreword.load(tiny_model, slots=1) as llm:
        yield llm


def own_replies(llm, turns: list[str], system: str | None = None) -> list[str]:
    chat = llm.chat(system, max_new_tokens=6, ignore_eos=True)
    return [chat.send(turn).text for turn in turns]


def test_each_line_of_a_pipe_is_a_turn(run, llm, tiny_model):
    shown = run("chat", "--model", tiny_model, *SHORT, input="hello\n\n  and again  \n")
    assert shown.exit_code == 0
    assert shown.stdout == "".join(f"{text}\n" for text in own_replies(llm, ["hello", "and again"]))
    assert shown.stderr == ""


def test_json_gives_one_object_per_turn(run, llm, tiny_model):
    asked = ("--system", "be brief", "--json")
    shown = run("chat", "--model", tiny_model, *asked, *SHORT, input="hello\nand again\n")
    turns = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(turn["turn"], turn["prompt"]) for turn in turns] == [(1, "hello"), (2, "and again")]
    assert [turn["text"] for turn in turns] == own_replies(llm, ["hello", "and again"], "be brief")
    assert turns[1]["stats"]["reused_tokens"] > 0


def test_quit_leaves_at_once(run, llm, tiny_model):
    shown = run("chat", "--model", tiny_model, *SHORT, input="hello\n/quit\nnever asked\n")
    assert shown.exit_code == 0
    assert shown.stdout == own_replies(llm, ["hello"])[0] + "\n"


def test_commands_answer_on_stderr(run, tiny_model):
    lines = "/help\n/stats\nhello\n/stats\n/reset\nhello\n/nonsense\n"
    shown = run("chat", "--model", tiny_model, *SHORT, "--json", input=lines)
    turns = [json.loads(line) for line in shown.stdout.splitlines()]
    assert turns[0]["text"] == turns[1]["text"]  # after /reset the same question gets the same answer
    assert turns[0]["stats"]["prompt_tokens"] == turns[1]["stats"]["prompt_tokens"]
    for message in ("/quit", "no reply yet", "6 tokens", "prompt tokens were still in the cache", "no command /nonsense"):
        assert message in shown.stderr


def test_a_path_is_not_a_command(run, tiny_model):
    shown = run("chat", "--model", tiny_model, *SHORT, "--json", input="/etc/hosts holds what?\n")
    assert json.loads(shown.stdout)["prompt"] == "/etc/hosts holds what?"


def test_a_conversation_that_exceeds_the_context(run, tiny_model):
    shown = run("chat", "--model", tiny_model, "--max-context", 40, *SHORT, input="hello\n" + "word " * 40 + "\n")
    assert shown.exit_code == 2
    assert shown.stderr.startswith("error: the prompt has")


def test_at_the_keyboard_it_continues_after_a_prompt_that_is_too_long(llm, capsys):
    session = ChatSession(llm.chat(max_new_tokens=6, ignore_eos=True), json=False, is_live=True)
    session.handle("word " * 500)
    assert capsys.readouterr().err.startswith("error: the prompt has")
    session.handle("hello")
    assert capsys.readouterr().out == own_replies(llm, ["hello"])[0] + "\n"


class Interrupted(foreword.Chat):
    """A conversation whose first reply is interrupted in the step after its first piece."""

    presses = 1

    def stream(self, text, **settings):
        pieces = super().stream(text, **settings)
        yield next(pieces)
        if self.presses:
            self.presses = 0
            with DelayedCtrlC():  # as during a step
                signal.raise_signal(signal.SIGINT)
        yield from pieces


def test_ctrl_c_stops_the_reply_and_forgets_the_turn(llm, capsys):
    chat = Interrupted(llm, None, {"max_new_tokens": 20, "ignore_eos": True})
    session = ChatSession(chat, json=False, is_live=True)
    before = signal.getsignal(signal.SIGINT)
    session.handle("hello")
    assert chat.messages == [] and session.replies == []
    assert signal.getsignal(signal.SIGINT) is before
    assert not llm.engine.busy
    capsys.readouterr()
    session.handle("hello")
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert capsys.readouterr().out == chat.messages[1]["content"] + "\n"


def test_ctrl_c_ends_a_pipe(llm):
    session = ChatSession(Interrupted(llm, None, {"max_new_tokens": 20, "ignore_eos": True}), json=False, is_live=False)
    with pytest.raises(KeyboardInterrupt):
        session.handle("hello")


def test_at_the_keyboard_it_warms_up_first(run, tiny_model, monkeypatch):
    """With the sampling of the conversation, up to a bounded length. In a pipe it starts at once."""
    asked = []
    monkeypatch.setattr(Engine, "warm_up", lambda engine, **given: asked.append(given))
    run("chat", "--model", tiny_model, *SHORT, input="hello\n")
    assert asked == []
    monkeypatch.setattr("foreword.cli.chat._at_keyboard", lambda: True)
    monkeypatch.setattr("foreword.cli.chat._lines", lambda: iter(["/quit"]))
    run("chat", "--model", tiny_model, *SHORT, "--temperature", 0.5, "--max-context", 64)
    (given,) = asked
    assert given["longest"] == 64 and given["sampling"].temperature == 0.5
