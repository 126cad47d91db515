"""Small real tokenizers, one of each kind that decodes in its own way."""

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from foreword.text import Tokenizer

CORPUS = ["the cat sat on the mat , and it is n't late .", "naïve café, 猫 and 🙂 end", "the end of the mat"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(chat_template: str | None = TEMPLATE) -> Tokenizer:
    """Byte-level BPE, like GPT-2, Llama 3, Qwen and SmolLM2; it adds a BOS to raw text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(" <note é> ", special=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    hf.chat_template = chat_template
    return Tokenizer(hf)


def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE, like Llama 2 and Gemma: spaces are part of the words, rare characters are byte pieces."""
    listed = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    listed += ["▁", "▁the", "▁▁", "cat", "s", ".", "é", "\ufffd"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(listed)}, [], unk_token="<unk>", byte_fallback=True))
    space = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def words(decoder: decoders.Decoder | None) -> Tokenizer:
    """Whole words, with the option to tidy spaces before punctuation, which a stream cannot do."""
    listed = ["<unk>", "</s>", "it", "is", "n't", "'s", "'", "##s", ".", ",", "?", "do", "m"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(listed)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        backend.decoder = decoder
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=True)
    return Tokenizer(hf)


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "word_piece": lambda: words(decoders.WordPiece(cleanup=True)),
    "metaspace": lambda: words(decoders.Metaspace()),
    "no_decoder": lambda: words(None),
}


@pytest.fixture(scope="session", params=KINDS)
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def templateless() -> Tokenizer:
    return byte_level(chat_template=None)


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Tokenizer:
    return byte_fallback()
