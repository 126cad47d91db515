"""The law of the stream: tokens that come in rounds stop where tokens that come one by one would stop."""

from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.text import Pushed, TextStream, Tokenizer


def run(stream: TextStream, rounds: list[list[int]]) -> tuple[str, int, bool]:
    """Text, tokens used, and whether it stopped, after the rounds or at the stop."""
    text, used = "", 0
    for ids in rounds:
        pushed = stream.push(ids)
        text, used = text + pushed.text, used + pushed.used
        if pushed.stopped:
            break
    return text + stream.flush(), used, stream.stopped


@settings(max_examples=100, deadline=None)
@given(data=st.data(), include=st.booleans())
def test_rounds_do_not_matter(any_tokenizer: Tokenizer, data: st.DataObject, include: bool) -> None:
    ids = st.integers(0, any_tokenizer.vocab_size + 3)
    rounds = data.draw(st.lists(st.lists(ids, max_size=6), max_size=20))
    tokens = [token for ids in rounds for token in ids]
    whole = any_tokenizer.decode(tokens)
    inside = st.builds(lambda start, size: whole[start : start + size], st.integers(0, len(whole)), st.integers(1, 5))
    stop = data.draw(st.lists((st.text("the \ufffd", max_size=3) | inside).filter(bool), max_size=3))

    together = run(TextStream(any_tokenizer, stop, include), rounds)
    alone = run(TextStream(any_tokenizer, stop, include), [[token] for token in tokens])
    assert together == alone
    text, used, stopped = together
    assert whole.startswith(text)
    assert stopped == any(string in whole for string in stop)
    if not stopped:
        assert (text, used) == (whole, len(tokens))
    elif not include:
        assert not any(string in text for string in stop)


def test_the_token_that_completes_the_stop_is_the_last_one_used(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.hf.convert_tokens_to_ids(c) for c in "xyENDzz"]
    stream = TextStream(tokenizer, "END")
    assert stream.push(ids[:3]) == Pushed("xy", 3, False)
    assert stream.push(ids[3:]) == Pushed("", 2, True)
    assert stream.push(ids) == Pushed("", 0, True)
    assert stream.flush() == ""


def test_a_token_may_go_past_the_stop(tokenizer: Tokenizer) -> None:
    ids = tokenizer.hf.encode("x the mat", add_special_tokens=False)
    the = next(i for i, token in enumerate(ids) if "the" in tokenizer.decode([token]))
    assert TextStream(tokenizer, ["th"]).push(ids) == Pushed("x ", the + 1, True)
    assert TextStream(tokenizer, ["th"], include_stop=True).push(ids) == Pushed("x th", the + 1, True)


def test_without_stops_every_token_is_used(tokenizer: Tokenizer) -> None:
    ids = tokenizer.hf.encode("the cat", add_special_tokens=False)
    assert TextStream(tokenizer).push([*ids, 1]) == Pushed("the cat", len(ids) + 1, False)


def test_a_stop_string_in_the_flushed_text_counts(fallback_tokenizer: Tokenizer) -> None:
    ids = [fallback_tokenizer.pieces.index(piece) for piece in ("cat", "<0xC3>", "<0xA9>")]
    stream = TextStream(fallback_tokenizer, "é")
    assert stream.push(ids) == Pushed("cat", 3, False)
    assert stream.flush() == ""
    assert stream.stopped
