"""What becomes of a prompt on its way to token ids, and of ids on their way back."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from foreword.errors import ModelCorrupt, ModelNotFound, PromptError
from foreword.text import Tokenizer

ASK = [{"role": "user", "content": "the cat"}]


def test_a_string_is_one_user_message(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode(ids, skip_special=False) == "<s><|user|>the cat</s><|assistant|>"
    assert ids == tokenizer.encode(ASK)
    assert ids == tokenizer.hf.apply_chat_template(ASK, add_generation_prompt=True)["input_ids"]
    assert all(type(i) is int for i in ids)


def test_the_template_brings_the_only_bos(tokenizer: Tokenizer) -> None:
    bos = tokenizer.hf.bos_token_id
    assert tokenizer.encode("the cat").count(bos) == 1
    assert tokenizer.encode("the cat", chat=False)[0] == bos
    assert tokenizer.encode("<s>the cat", chat=False) == tokenizer.encode("the cat", chat=False)


def test_without_a_template_a_string_is_taken_raw(tokenizer: Tokenizer, templateless: Tokenizer) -> None:
    raw = templateless.encode("the cat")
    assert raw == templateless.encode("the cat", chat=False) == tokenizer.encode("the cat", chat=False)
    assert templateless.decode(raw, skip_special=False) == "<s>the cat"


def test_messages_need_a_template(tokenizer: Tokenizer, templateless: Tokenizer) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        templateless.encode(ASK)
    with pytest.raises(PromptError, match="chat=False"):
        tokenizer.encode(ASK, chat=False)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("prompt", ["", " \n\t", None, 5, b"the cat", ("the", "cat")])
def test_what_is_no_prompt_is_refused(tokenizer: Tokenizer, prompt: object, chat: bool) -> None:
    with pytest.raises(PromptError):
        tokenizer.encode(prompt, chat=chat)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one"),
        (["the cat"], "message 0 must be"),
        ([*ASK, {"content": "the"}], "message 1 has role None"),
        ([{"role": "narrator", "content": "the"}], "narrator"),
        ([{"role": ["user"], "content": "the"}], "has role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": [{"type": "text", "text": "the"}]}], "as a string"),
        ([{"role": "user", "content": "  "}], "empty"),
        ([*ASK, {"role": "tool", "content": "4"}], "no tools here"),
    ],
)
def test_bad_messages_are_refused_with_the_reason(tokenizer: Tokenizer, messages: list, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        tokenizer.encode(messages)


@pytest.mark.parametrize("chat", [True, False])
def test_broken_unicode_is_refused(tokenizer: Tokenizer, chat: bool) -> None:
    with pytest.raises(PromptError, match="Unicode"):
        tokenizer.encode("the \udcff cat", chat=chat)


def test_many_at_once_are_the_same(tokenizer: Tokenizer, templateless: Tokenizer) -> None:
    said = [{"role": "user", "content": "there"}]
    good = ["hello", "a longer text, of more words", said]
    found = tokenizer.encode_all([good[0], " ", good[1], [{"role": "?"}], "\ud800", good[2]])
    assert [one for one in found if isinstance(one, list)] == [tokenizer.encode(prompt) for prompt in good]
    assert [isinstance(one, PromptError) for one in found] == [False, True, False, True, True, False]
    begun, bare = str(templateless.hf.bos_token) + "hello", "hello"
    assert templateless.encode_all([bare, begun]) == [templateless.encode(bare), templateless.encode(begun)]
    assert isinstance(templateless.encode_all([said])[0], PromptError) and tokenizer.encode_all([]) == []


def test_a_text_without_tokens_is_refused() -> None:
    knows_one_letter = PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE({"a": 0}, [])))
    assert Tokenizer(knows_one_letter).encode("ba") == [0]
    with pytest.raises(PromptError, match="no tokens"):
        Tokenizer(knows_one_letter).encode("b")


def test_decoding_leaves_spaces_alone(any_tokenizer: Tokenizer) -> None:
    punctuation = [i for i, piece in enumerate(any_tokenizer.pieces) if piece in ("it", "n't", ".", "?")]
    plain = any_tokenizer.hf.backend_tokenizer.decode(punctuation)
    assert any_tokenizer.decode(punctuation) == plain


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the cat", chat=False), *tokenizer.eos_ids]
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, skip_special=False) == "<s>the cat</s>"


def test_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer.pieces) == tokenizer.hf.vocab_size + 1
    assert tokenizer.pieces[-1] == " <note é> "
    assert tokenizer.pieces[:2] == ["<s>", "</s>"]
    assert tokenizer.eos_ids == (1,)


def test_only_what_is_decoded_speaks(tokenizer: Tokenizer, fallback_tokenizer: Tokenizer) -> None:
    silent = {i for i in range(-1, tokenizer.vocab_size + 2) if not tokenizer.speaks(i)}
    assert silent == {-1, 0, 1, 2, 3, tokenizer.vocab_size, tokenizer.vocab_size + 1}
    assert fallback_tokenizer.speaks(fallback_tokenizer.pieces.index("▁"))


def test_a_saved_tokenizer_comes_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.hf.save_pretrained(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.encode("the cat, 猫") == tokenizer.encode("the cat, 猫")
    assert again.pieces == tokenizer.pieces


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [None, "{broken", '{"model": 1}'])
def test_a_damaged_tokenizer_is_reported_with_its_folder(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ModelCorrupt, match=tmp_path.name):
        Tokenizer.load(tmp_path)
