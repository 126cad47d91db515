"""The laws for models of unknown families, which transformers runs alone (`slow=True`): drafts change nothing.

Every method and sampling with each of them, one at a time and together: `pytest tests/lossless/test_slow.py -m cross`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest
import torch

from doubles import (
    SAMPLINGS,
    SLOW_FAMILIES,
    VOCABULARY,
    Liar,
    Oracle,
    byte_tokenizer,
    chain,
    drafter,
    engine,
    fresh,
    full_sequence,
    hf_logits,
    requests,
    tiny,
    truth,
    written,
)
from foreword import load
from foreword.core.draft import Draft, Tree
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.core.state import Batch
from foreword.drafters.resolve import DrafterRequest
from foreword.errors import DrafterError, ForewordWarning, InputError, ModelUnsupported
from foreword.model import cost
from foreword.model.fingerprint import Fingerprint
from foreword.model.slow import METHODS, Copied, Cropped, Reread, SlowModel, check_slow, reader_of
from foreword.prove.referee import Case, Referee
from foreword.serve.ready import ready

FLOAT = torch.float32
READERS = {"deepseek_v3": Cropped, "qwen3_next": Copied, "mamba2": Reread, "stablelm": Cropped}
each_family = pytest.mark.parametrize("family", SLOW_FAMILIES)


@lru_cache
def reader(family: str) -> type:
    return reader_of(tiny(family, FLOAT))


def slow(family: str) -> SlowModel:
    return SlowModel(tiny(family, FLOAT), "tiny", reader(family))


@each_family
def test_how_a_cache_gives_up_rejected_rows_is_found_by_trying(family: str) -> None:
    assert reader(family) is READERS[family]


@each_family
def test_plain_writes_what_transformers_generates(family: str) -> None:
    """One request after another, each by `generate` with the cache of transformers."""
    model = slow(family)
    (request,) = requests(2, max_new_tokens=8, ignore_eos=True)[1:]
    with torch.no_grad():
        own = model.hf.generate(torch.tensor([request.prompt]), max_new_tokens=8, do_sample=False, eos_token_id=VOCABULARY)
    assert written(engine(drafter("plain", model), model), [request]) == [own[0, len(request.prompt) :].tolist()]


@each_family
def test_methods_write_the_truth(family: str) -> None:
    """Both methods that draft, greedy and sampled requests in one batch, and again from the rows that a slot holds."""
    model = slow(family)
    asked = [*requests(2, max_new_tokens=8)[1:], *requests(3, SAMPLINGS["T=0.8"], max_new_tokens=8, reuse=True)[1:]]
    expected = [truth(model.hf, request) for request in asked]
    for name in ("prompt_lookup", "token_recycling"):
        serving = engine(drafter(name, model), model)
        assert written(serving, asked) == expected
        assert written(serving, asked[::-1]) == expected[::-1]


@each_family
def test_correct_tokens_among_wrong_ones(family: str) -> None:
    """Trees become chains, of which all, some or no tokens are right."""
    model = slow(family)
    asked = requests(2, max_new_tokens=8, ignore_eos=True)
    expected = [truth(model.hf, request) for request in asked]
    known = [full_sequence(model.hf, request) for request in asked]
    drafters = Oracle(known, lies=0), Oracle(known), Liar()
    assert [written(engine(one, model, slots=2), asked) for one in drafters] == [expected] * 3
    quickest = engine(Oracle(known, lies=0), model).generate(asked)
    assert all(sum(run.accepted) > len(run.accepted) for run in quickest), "no draft was accepted"


@pytest.mark.cross
@each_family
@pytest.mark.parametrize("name", METHODS)
def test_every_sampling_and_batch(name: str, family: str) -> None:
    model = slow(family)
    for sampling, slots in product(SAMPLINGS.values(), (1, 3)):
        asked = requests(4, sampling, max_new_tokens=14)
        found = written(engine(drafter(name, model), model, slots), asked)
        assert found == [truth(model.hf, request) for request in asked]


def test_log_probabilities_of_a_prompt() -> None:
    """They are read off the logits that a pass over it gives."""
    model = slow("stablelm")
    (request,) = requests(2, max_new_tokens=2, prompt_logprobs=0)[1:]
    (run,) = engine(drafter("plain", model), model).generate([request])
    expected = hf_logits(model.hf, request.prompt)[:-1].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(request.prompt[1:]).unsqueeze(1)).squeeze(1)
    found = torch.tensor([entry.logprob for entry in run.prompt_logprobs[-len(chosen) :]], dtype=torch.float64)
    torch.testing.assert_close(found, chosen, atol=1e-4, rtol=0)


def logits_of(model: SlowModel, slot: int, tokens: Sequence[int]) -> torch.Tensor:
    scores = model.score(Batch.of([slot], 64), chain([list(tokens)]), Needs())
    return scores.require_logits()[0].double()


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_rows_of_another_slot_are_copied(family: str) -> None:
    model, tokens = slow(family), [5, 9, 31, 8, 40, 7, 7, 12]
    cache, expected = model.allocate(2, 64, 8), hf_logits(model.hf, [*tokens[:5], 30, 3])[5:]
    logits_of(model, 0, tokens)
    cache.length[0] = len(tokens)
    cache.copy(0, 1, 5)
    assert int(cache.length[1]) == 5
    torch.testing.assert_close(logits_of(model, 1, [30, 3]), expected, atol=1e-4, rtol=0)


def test_first_chain_of_a_tree() -> None:
    tree = Tree.of((0, 0, 0, 1, 1, 4, 2))
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15, 16]] * 3)
    origin = torch.tensor([[0, 1, 1, 2, 2, 1, 1]])
    found = Draft(tokens, tree, torch.tensor([7, 3, 1]), origin=origin).first_chain()
    assert found.tree.is_chain and found.size.tolist() == [3, 2, 1]
    assert [row[:size] for row, size in zip(found.tokens.tolist(), found.size.tolist(), strict=True)] == [
        [10, 11, 13],
        [10, 11],
        [10],
    ]
    assert found.origins[0].tolist() == [0, 1, 2]


def test_what_passes_cost_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Chains after a sequence that was never read. What reads the whole sequence again costs the same for any draft."""
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "ROWS", (1, 4))
    model = SlowModel(fresh("stablelm", FLOAT, max_position_embeddings=512), "tiny", Cropped)
    curve = cost.curve_for(model)
    assert curve.rows == (1, 4) and all(seconds > 0 for seconds in curve.seconds)
    assert cost.facts_of(model)["slow"] == model.slow
    assert slow("mamba2").cost(4) == 1.0


def test_the_referee_judges_a_slow_model() -> None:
    """transformers scores both tokens again in float64; the replays are passes of the slow model."""
    model, prompt = slow("deepseek_v3"), (5, 9, 31, 8)
    scores = hf_logits(model.hf, prompt)[-1]
    best, worst = int(scores.argmax()), int(scores.argmin())
    case = Case((*prompt, best), len(prompt), len(prompt), Sampling(seed=0), plain=best, method=worst)
    (found,) = Referee(model).judge([case])
    ruling = found[case]
    assert (ruling.verdict, ruling.reason) == ("bug", "gap")
    assert ruling.gap == pytest.approx(float(scores[best] - scores[worst]), rel=1e-3)


# What is said and what is refused --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("slow")
    fresh("deepseek_v3", FLOAT, vocab_size=256, eos_token_id=None).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def test_a_folder_says_that_it_runs_slow(folder: Path) -> None:
    with pytest.warns(
        ForewordWarning, match="deepseek_v3 runs by the forward pass of transformers; rejected rows are cropped"
    ):
        llm = load(folder, slow=True, rows=4)
    with llm:
        assert llm.method == "prompt_lookup" and "cropped" in llm.slow
        assert "(slow)" in repr(llm) and "slow: by the forward pass" in repr(llm)
        answer = llm.generate([5, 9, 31, 8], max_new_tokens=4)
        assert answer.model.endswith("(slow)") and ready(llm).model == answer.model
        assert Fingerprint.of(llm.model).matches(Fingerprint.of(llm.model))
        with pytest.raises(DrafterError, match="runs slow.*medusa needs more of it; choose from plain, prompt_lookup"):
            llm.use("medusa")
        with pytest.raises(ModelUnsupported, match="shows its logits alone"):
            llm.model.stack(1)


def test_an_unknown_family_names_the_way_out(folder: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"slow=True \(--slow\) runs it by the forward pass of transformers"):
        load(folder)


def test_drafters_that_read_states_are_refused() -> None:
    class Reads(Liar):
        needs = Needs(hidden=True)

    with pytest.raises(DrafterError, match="logits alone"):
        DrafterRequest.of(Reads).resolve(slow("stablelm"))


def test_trees_are_refused_by_the_target() -> None:
    model = slow("stablelm")
    model.allocate(1, 64, 8)
    with pytest.raises(DrafterError, match="verifies chains"):
        model.score(
            Batch.of([0], 0), Draft(torch.zeros(1, 3, dtype=torch.long), Tree.of((0, 0, 0)), torch.tensor([3])), Needs()
        )


def test_a_family_that_runs_fast_is_refused() -> None:
    with pytest.raises(InputError, match="it runs llama itself.*leave slow out"):
        check_slow(tiny("llama").config)


def test_rotary_angles_that_follow_the_length_are_refused() -> None:
    config = fresh("stablelm", FLOAT).config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ModelUnsupported, match="a rejected draft could change the output; it is refused with slow=True too"):
        check_slow(config)


def test_rows_that_depend_on_later_ones_are_refused() -> None:
    """Such a row has another answer alone than in a draft."""
    hf = fresh("stablelm", FLOAT)
    hf.model.layers[1].register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    with pytest.raises(ModelUnsupported, match="depends on later tokens"):
        reader_of(hf)
