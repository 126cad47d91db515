"""Trained drafters through the Python API: load, wrap and use take a folder, give the output of plain, and fail safely."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

import foreword
from doubles import IN_PROCESS, TRAINED, truth
from foreword.bench import contender
from foreword.bench.contenders import GenerationSettings, Task
from foreword.core.sampling import Sampling
from foreword.engine.request import Request
from foreword.errors import DrafterError
from foreword.prove import prove
from foreword.text import Prompt

pytestmark = pytest.mark.usefixtures("own_home")

ASK = "the words that come before the words"


def expected(hf: PreTrainedModel, llm: foreword.LLM, count: int = 12) -> list[int]:
    return truth(hf, Request(tuple(llm.tokenizer.encode(ASK)), Sampling(seed=0), max_new_tokens=count), 512, (1,))


@pytest.mark.parametrize("method", TRAINED)
def test_a_loaded_drafter_writes_the_truth(
    method: str, folders: dict[str, Path], trained: dict[str, Path], stock: dict[str, PreTrainedModel]
) -> None:
    options = {"rows": 6, "slots": 3, **IN_PROCESS.get(method, {})}
    with foreword.load(folders["llama"], method, drafter=trained[method], **options) as llm:
        results = llm.generate([ASK] * 4, max_new_tokens=12)
        assert [result.tokens for result in results] == [expected(stock["llama"], llm)] * 4
        assert llm.method == results[0].method == method
        assert sum(result.stats.spec_decode_num_draft_tokens for result in results) > 0


def test_the_folder_alone_names_the_method(folders: dict[str, Path], trained: dict[str, Path]) -> None:
    with foreword.load(folders["llama"], drafter=str(trained["hydra"]), rows=4) as llm:
        assert llm.method == "hydra"
        assert llm.use(drafter=trained["clover2"], rows=4).method == "clover2"
        assert llm.use("medusa", drafter=trained["medusa"]).method == "medusa"  # rows: as many as pay off here


def test_a_wrapped_model_takes_a_drafter(folders: dict[str, Path], trained: dict[str, Path], hf_tokenizer: Any) -> None:
    hf = AutoModelForCausalLM.from_pretrained(folders["llama"])
    llm = foreword.wrap(hf, hf_tokenizer, drafter=trained["clover"], rows=4)
    assert llm.method == "clover" and llm.generate(ASK, max_new_tokens=12).tokens == expected(hf, llm)


def test_weights_that_were_trained_are_those_that_draft(
    folders: dict[str, Path], trained: dict[str, Path], keep_drafter: Callable[..., Path], tmp_path: Path
) -> None:
    """One drafter that proposes what the target's own head says, and one with random weights: they draft differently."""

    def drafted(folder: Path) -> list[int]:
        with foreword.load(folders["llama"], drafter=folder, rows=4) as llm:
            stats = llm.generate(ASK, max_new_tokens=40, ignore_eos=True).stats
            return [stats.rounds, *stats.spec_decode_num_accepted_tokens_per_pos]

    assert drafted(trained["medusa"]) == drafted(trained["medusa"])
    assert drafted(trained["medusa"]) != drafted(keep_drafter("medusa", folders["llama"], tmp_path / "other", layers=2))


def test_a_folder_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="none is missing"):
        foreword.load("no/such/model", drafter=tmp_path / "none")


def test_after_an_unusable_drafter_the_current_one_stays(
    folders: dict[str, Path], trained: dict[str, Path], keep_drafter: Callable[..., Path], tmp_path: Path
) -> None:
    foreign = keep_drafter("clover", folders["qwen3"], tmp_path / "foreign")
    with foreword.load(folders["llama"], "prompt_lookup", rows=3) as llm:
        stream = llm.stream(ASK, max_new_tokens=12)
        next(iter(stream))
        with pytest.raises(DrafterError, match=f"trained for {folders['qwen3'].name} .*target is .*{folders['llama'].name}"):
            llm.use(drafter=foreign)
        assert llm.method == "prompt_lookup"
        assert stream.result.tokens == llm.generate(ASK, max_new_tokens=12).tokens
    with pytest.raises(DrafterError, match="trained for"):
        foreword.load(folders["llama"], drafter=foreign)


def test_proof_and_bench_take_folders(folders: dict[str, Path], trained: dict[str, Path]) -> None:
    name = f"clover={trained['clover']}"
    with foreword.load(folders["llama"], "plain", slots=2) as llm:
        report = prove(llm, [name], [Prompt("1", "", [ASK])], [Sampling(seed=0)], 8, rows=4)
        assert report.bugs == 0 and report.methods[name].drafted > 0
        one, plain = contender(llm, name, rows=4), contender(llm, "plain")
        asked, settings = [Task("1", tuple(llm.tokenizer.encode(ASK)))], GenerationSettings(8)
        assert one.name == name and one.write(asked, settings)[0].tokens == plain.write(asked, settings)[0].tokens


def test_a_proof_refuses_a_foreign_drafter_before_it_generates(
    folders: dict[str, Path], keep_drafter: Callable[..., Path], tmp_path: Path
) -> None:
    foreign, calls = keep_drafter("medusa", folders["qwen3"], tmp_path / "foreign"), []
    with foreword.load(folders["llama"], "plain") as llm:
        with pytest.raises(DrafterError, match="trained for"):
            prove(
                llm,
                [f"medusa={foreign}"],
                [Prompt("1", "", [ASK])],
                [Sampling(seed=0)],
                4,
                progress=lambda *a: calls.append(a),
            )
    assert not calls
