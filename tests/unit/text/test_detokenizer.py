"""The law of the detokenizer: however the ids are divided, the pieces add up to the text, and none is broken."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.text import Detokenizer, Tokenizer

TEXTS = st.text(st.sampled_from("the cat.é猫🙂\n <note é> 's\ufffd\u200d"), max_size=60)


def deal(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Cut the ids into chunks of these sizes, over and over."""
    chunks: list[list[int]] = []
    start = 0
    while start < len(ids):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(list(ids[start : start + size]))
        start += size
    return chunks


def sizes() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), sizes=sizes(), skip=st.booleans())
def test_the_pieces_add_up_to_the_text(any_tokenizer: Tokenizer, data: st.DataObject, sizes: list[int], skip: bool) -> None:
    size = any_tokenizer.vocab_size
    # The last ids twice as often: in a tokenizer that is mostly byte pieces, they are the words.
    ids = data.draw(st.lists(st.integers(0, size + 3) | st.integers(size - 8, size), max_size=120))
    detokenizer = Detokenizer(any_tokenizer, skip)
    pieces = [detokenizer.push(chunk) for chunk in deal(ids, sizes)]
    assert "".join([*pieces, detokenizer.flush()]) == any_tokenizer.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_long_broken_runs_add_up_too(tokenizer: Tokenizer, data: st.DataObject) -> None:
    lead, *rest = [tokenizer.hf.convert_tokens_to_ids(c) for c in ("ð", "Ł", "Ļ", "Ĥ")]  # the four bytes of U+1F642
    ids = data.draw(st.lists(st.sampled_from([lead, *rest, 1, 300]), min_size=30, max_size=120))
    detokenizer = Detokenizer(tokenizer)
    assert "".join([*(detokenizer.push([i]) for i in ids), detokenizer.flush()]) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text), sizes=sizes())
def test_no_piece_is_a_broken_character(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.hf.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(chunk) for chunk in deal(ids, sizes)]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_text_comes_as_soon_as_it_is_settled(tokenizer: Tokenizer) -> None:
    ids = tokenizer.hf.encode("a é🙂b", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for n, token in enumerate(ids, 1):
        shown += detokenizer.push([token])
        assert shown == tokenizer.decode(ids[:n]).removesuffix("\ufffd")


def test_an_unfinished_character_is_left_to_flush(tokenizer: Tokenizer) -> None:
    first_byte = tokenizer.hf.convert_tokens_to_ids("ð")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([first_byte]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_spaces_survive_special_tokens(fallback_tokenizer: Tokenizer) -> None:
    the = fallback_tokenizer.pieces.index("▁the")
    detokenizer = Detokenizer(fallback_tokenizer)
    pieces = [detokenizer.push([token]) for token in [the, *[2] * 40, the]]
    assert "".join(pieces) == "the the"


def test_byte_pieces_wait_until_their_run_is_over(fallback_tokenizer: Tokenizer) -> None:
    byte = {value: fallback_tokenizer.pieces.index(f"<0x{value:02X}>") for value in (0xC3, 0xA9, 0xFF)}
    cat = fallback_tokenizer.pieces.index("cat")
    detokenizer = Detokenizer(fallback_tokenizer)
    # A stray byte breaks the whole run, also the é before it.
    assert [detokenizer.push([i]) for i in (cat, byte[0xC3], byte[0xA9])] == ["cat", "", ""]
    assert detokenizer.push([byte[0xFF], cat]) == "\ufffd\ufffd\ufffdcat"


class Counting(Tokenizer):
    """Counts the ids that it decodes."""

    decoded = 0

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special)


@pytest.mark.parametrize("piece", ["t", "ð", "Ļ"])
def test_the_work_is_linear(tokenizer: Tokenizer, piece: str) -> None:
    counting = Counting(tokenizer.hf)
    token = tokenizer.hf.convert_tokens_to_ids(piece)
    detokenizer = Detokenizer(counting)
    pieces = [detokenizer.push([token]) for _ in range(3000)]
    assert len("".join(pieces)) >= 2999
    assert counting.decoded < 3000 * 24
