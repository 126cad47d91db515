"""A whole model as draft model: of any family, with the same vocabulary token by token, through the Python API."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedModel

import foreword
from doubles import truth
from foreword.core.sampling import Sampling
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.request import Request
from foreword.errors import DrafterError, InputError
from foreword.methods import untrained
from foreword.model.model import Model

pytestmark = pytest.mark.usefixtures("own_home")

ASK = "the words that come before the words"


@pytest.fixture
def keep_model(talking: Any, hf_tokenizer: Any, tmp_path: Path) -> Any:
    """Saves a small model: keep_model("llama", num_hidden_layers=1)."""

    def keep(family: str, tokenizer: Any = hf_tokenizer, **changes: Any) -> Path:
        folder = tmp_path / f"{family}-small"
        talking(family, **changes).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return keep


def expected(hf: PreTrainedModel, llm: foreword.LLM, **options: Any) -> list[int]:
    sampling = Sampling(**{"seed": 3} | options)
    return truth(hf, Request(tuple(llm.tokenizer.encode(ASK)), sampling, max_new_tokens=16), 512, (1,))


@pytest.mark.parametrize("tree", ["best", "chain"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_model_of_another_family_drafts(
    family: str, tree: str, folders: dict[str, Path], stock: dict[str, PreTrainedModel]
) -> None:
    with foreword.load(folders["llama"], drafter=folders[family], rows=6, slots=2, tree=tree, stop=0.0) as llm:
        assert llm.method == "draft_model"
        for options in ({}, {"temperature": 0.7}):
            results = llm.generate([ASK] * 2, max_new_tokens=16, seed=3, **options)
            assert results[0].tokens == expected(stock["llama"], llm, **options)
            assert sum(result.stats.spec_decode_num_draft_tokens for result in results) > 0


@pytest.mark.parametrize("compile", [True, False])
def test_the_target_itself_is_always_right(compile: bool, folders: dict[str, Path]) -> None:
    """Its layers are rebuilt like those of any loaded model: they read trees in their own scratch rows."""
    with foreword.load(folders["llama"], "draft_model", drafter=folders["llama"], rows=4, tree="chain", stop=0.0,
                       fused_layers=compile) as llm:  # fmt: skip
        stats = llm.generate(ASK, max_new_tokens=16, ignore_eos=True).stats
        assert stats.rounds == 4


def test_padding_may_differ(folders: dict[str, Path], hf_tokenizer: Any, keep_model: Any) -> None:
    """A draft model with a longer head than the target's proposes only tokens of the target. One with a shorter head
    continues after tokens that it has no row for."""
    longer = keep_model("llama", vocab_size=len(hf_tokenizer) + 512)
    highest = []
    for model, drafter in ((folders["llama"], longer), (longer, folders["llama"])):
        with foreword.load(model, drafter=drafter, rows=6) as llm:
            tokens = llm.generate(ASK, max_new_tokens=16, ignore_eos=True).tokens
            assert tokens == llm.use("plain").generate(ASK, max_new_tokens=16, ignore_eos=True).tokens
            highest.append(max(tokens))
    assert highest[0] < len(hf_tokenizer) <= highest[1]


def test_another_vocabulary_is_refused_by_its_first_token(folders: dict[str, Path], keep_model: Any) -> None:
    tokenizer = foreword.load(folders["llama"], "plain").tokenizer.hf.__class__.from_pretrained(folders["llama"])
    count = len(tokenizer)
    tokenizer.add_tokens([AddedToken("<more>")])
    folder = keep_model("qwen3", tokenizer, vocab_size=count + 1)
    with foreword.load(folders["llama"], "prompt_lookup") as llm:
        with pytest.raises(DrafterError, match=f"draft_model: token {count} is '' in .* and '<more>' in qwen3-small"):
            llm.use("draft_model", drafter=folder)
        assert llm.method == "prompt_lookup" and llm.generate(ASK, max_new_tokens=4).tokens


def test_a_shorter_context_is_refused(folders: dict[str, Path], keep_model: Any) -> None:
    folder = keep_model("llama", max_position_embeddings=64)
    with pytest.raises(DrafterError, match="llama-small reads 64 tokens, but .* can have 512; .*max_context=64"):
        foreword.load(folders["llama"], drafter=folder)
    with foreword.load(folders["llama"], drafter=folder, max_context=64, rows=4) as llm:
        assert llm.generate(ASK, max_new_tokens=4).tokens


def test_what_is_refused_before_anything_is_loaded(folders: dict[str, Path]) -> None:
    with pytest.raises(DrafterError, match="holds a whole model, which medusa cannot draft with; use draft_model"):
        DrafterRequest.of("medusa", folders["llama"])
    with pytest.raises(InputError, match="layers are those of a trained drafter"):
        DrafterRequest.of("draft_model", folders["llama"], layers=2)
    with pytest.raises(InputError, match="no option is called 'colour'"):
        DrafterRequest.of("draft_model", folders["llama"], colour=1)


def test_without_tokenizers_the_sizes_are_compared(talking: Any) -> None:
    small, large = Model(talking("llama"), "small"), Model(talking("llama", vocab_size=300), "large")
    with pytest.raises(DrafterError, match="draft_model: small has 261 tokens and large has 300"):
        untrained("draft_model", model=small).prepare(large, 1)
