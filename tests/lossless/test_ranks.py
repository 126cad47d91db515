"""The law for tensor parallelism: two ranks generate what one process does, token for token and round for round.

Each test is one launch of two processes, which sum over gloo. The first runs in `make test`; the rest, every method that
needs no target of its own kind, is `pytest tests/lossless/test_ranks.py -m cross`, and takes minutes.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import TRAINED, byte_tokenizer, talking_model, tiny, with_random_weights
from doubles.ranks_program import run
from foreword import AsyncLLM, load
from foreword.drafters.saved import save
from foreword.errors import InputError, ModelUnsupported
from foreword.methods import METHODS
from foreword.model.families import FAMILIES
from foreword.model.loading import load_stock
from foreword.model.model import Model
from foreword.model.sharding import check_divisible
from foreword.ranks.group import check_launch

PROGRAM = Path(__file__).parents[1] / "doubles" / "ranks_program.py"
PATIENCE_S = 300.0

UNTRAINED = {"plain": {}, "token_recycling": {"rows": 8}, "prompt_lookup": {"rows": 8}}
PROMPTS = [[5, 6, 7, 5, 6], [40, 9, 9, 41, 9, 9, 41, 9], [60]]
GREEDY = {"prompts": PROMPTS, "settings": {"max_new_tokens": 8, "ignore_eos": True}}
SAMPLED = {
    "prompts": PROMPTS,
    "settings": {"max_new_tokens": 8, "temperature": 0.9, "top_p": 0.95, "seed": 5},
    "each": [{"stop": ["a", "e"]}, {"repetition_penalty": 1.1}, {"logprobs": 2}],
}
ASKED = [GREEDY, SAMPLED]


def kept_model(family: str, folder: Path, **changes: Any) -> str:
    """Save a tiny model, and return its folder."""
    talking_model(family, num_hidden_layers=4, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def kept_drafter(method: str, model: str, folder: Path) -> str:
    """Save a drafter with random weights for a model, and return its folder."""
    target = Model(load_stock(Path(model), torch.device("cpu"), torch.float32))
    save(with_random_weights(method, target, **TRAINED[method]), folder, target)
    return str(folder)


def step(folder: str, dtype: str, methods: dict[str, Any]) -> dict[str, Any]:
    options = {"dtype": dtype, "max_context": 96, "slots": 2, "isolated": False}
    return {"folder": folder, "options": options, "methods": methods, "asked": ASKED}


def launched(folder: Path, **plan: Any) -> tuple[list[Any], subprocess.CompletedProcess[str]]:
    """Run a plan on two ranks. Return what the first one found, and the finished launch."""
    file, out = folder / "plan.json", folder / "out.json"
    file.write_text(json.dumps({"refused": [], "steps": [], "dies": None} | plan))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", PROGRAM, file, out]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert out.exists(), done.stderr
    return json.loads(out.read_text()), done


def alone(one: dict[str, Any]) -> Any:
    """Return what a single process finds, as JSON has it."""
    return json.loads(json.dumps(run(one, None)))


def check(steps: list[dict[str, Any]], found: list[Any]) -> None:
    for one, of_ranks in zip(steps, found, strict=True):
        refusals = of_ranks.pop("refused")
        assert [message.split(";")[0] for message in refusals] == [
            "tp is 2 and the method is amusd, whose rounds depend on the clock",
            "rounds cannot be traced while several ranks run the model",
        ]
        expected = alone(one)
        del expected["refused"]
        assert of_ranks == expected, one["folder"]


def test_two_ranks_generate_what_one_process_does_and_end_together(tmp_path: Path) -> None:
    families = {family: kept_model(family, tmp_path / family) for family in ("llama", "qwen3", "qwen3_moe")}
    trained = {"clover2": {"drafter": kept_drafter("clover2", families["llama"], tmp_path / "clover2"), "rows": 16}}
    steps = [
        step(families["llama"], "float64", UNTRAINED | trained),
        step(families["llama"], "float32", UNTRAINED | trained),  # on our own layers
        step(families["qwen3"], "float64", UNTRAINED),
        step(families["qwen3_moe"], "float64", UNTRAINED),
    ]
    uneven = kept_model("llama", tmp_path / "uneven", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    refused = [(uneven, {"tp": 2}), (families["llama"], {"tp": 4}), (families["llama"], {"tp": 2, "quantization": "q8"})]
    found, done = launched(tmp_path, refused=refused, steps=steps, dies=families["llama"])

    refusals = [message for (message,) in found[: len(refused)]]
    assert (
        "3 attention heads (num_attention_heads in config.json) cannot be divided over 2 ranks; tp can be 1" in refusals[0]
    )
    assert "torchrun started 2 processes; give --nproc-per-node 4, or tp=2" in refusals[1]
    assert "quantization is 'q8'; leave one of them out" in refusals[2]
    check(steps, found[len(refused) :])
    assert done.returncode != 0 and "all was generated" not in done.stdout
    assert done.stderr.count("Foreword: rank 1 of 2 is gone: its process was killed, or crashed. All ranks end.") == 1


OTHERS = {"self_speculative": {"attention": [1], "mlp": [2]}, "swift": {"ratio": 0.5, "rows": 8}}


@pytest.mark.cross
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_every_method_on_two_ranks(tmp_path: Path, family: str, dtype: str) -> None:
    folder = kept_model(family, tmp_path / family)
    trained = [name for name, method in METHODS.items() if method.trained and not method.looped and name != "amusd"]
    drafters = {name: {"drafter": kept_drafter(name, folder, tmp_path / name), "rows": 16} for name in trained}
    steps = [step(folder, dtype, UNTRAINED | OTHERS | drafters)]
    found, done = launched(tmp_path, steps=steps)
    assert done.returncode == 0, done.stderr
    check(steps, found)


NOT_DIVIDED = {"gpt_oss", "hunyuan_v1_dense", "foreword_looped", "gpt_neox", "gpt2", "opt"}
CHANGES = {"cohere": {"use_qk_norm": False}}


@pytest.mark.cross
def test_every_other_family_on_two_ranks(tmp_path: Path) -> None:
    others = [family for family in FAMILIES if family not in NOT_DIVIDED | {"llama", "qwen3", "qwen3_moe"}]
    few = {name: UNTRAINED[name] for name in ("plain", "token_recycling")}
    models = [kept_model(family, tmp_path / family, **CHANGES.get(family, {})) for family in others]
    steps = [step(folder, "float64", few) for folder in models]
    found, done = launched(tmp_path, steps=steps)
    assert done.returncode == 0, done.stderr
    check(steps, found)


@pytest.mark.parametrize("family", ["cohere", *sorted(NOT_DIVIDED)])
def test_families_that_cannot_be_divided_are_refused(family: str) -> None:
    config = tiny(family, torch.float32).config
    with pytest.raises(ModelUnsupported, match="leave tp out"):
        check_divisible(FAMILIES[family], config, 2)


def test_a_process_alone_learns_how_to_start_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="torchrun --nproc-per-node 2"):
        check_launch(2)
    with pytest.raises(InputError, match="whole number"):
        check_launch(0)
    check_launch(1)


@pytest.mark.cross
def test_generate_starts_the_other_ranks(tmp_path: Path) -> None:
    folder = kept_model("llama", tmp_path / "llama")
    command = [sys.executable, "-m", "foreword", "generate", "hello", "--model", folder, "--method", "token_recycling"]
    command += ["--rows", "8", "--device", "cpu", "--threads", "1", "--max-new-tokens", "20", "--ignore-eos", "--json"]
    ran = [subprocess.run([*command, *more], capture_output=True, text=True, check=True) for more in ([], ["--tp", "2"])]
    one, two = (json.loads(done.stdout)["tokens"] for done in ran)
    assert one == two and len(one) == 20


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.cross
def test_a_server_starts_its_ranks_again(tmp_path: Path) -> None:
    """The engine's process is the first rank. If another one is killed, it ends, and the server starts both again."""
    folder = kept_model("llama", tmp_path / "llama")
    with load(folder, "plain", device="cpu", threads=1, max_context=96) as llm:
        expected = llm.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True).tokens

    async def serve_and_kill() -> list[list[int]]:
        options = {"device": "cpu", "threads": 1, "max_context": 96, "rows": 8, "tp": 2, "warm_up": False}
        async with AsyncLLM(folder, "token_recycling", restarts=1, **options) as server:
            before = await server.agenerate([5, 6, 7], max_new_tokens=8, ignore_eos=True)
            engine: Any = server._transport
            (other,) = children(engine._process.pid)
            os.kill(other, signal.SIGKILL)
            await asyncio.to_thread(engine._process.wait)
            while engine.health.state != "ready":
                await asyncio.sleep(0.1)
            after = await server.agenerate([5, 6, 7], max_new_tokens=8, ignore_eos=True)
            (other,) = children(engine._process.pid)
        while Path(f"/proc/{other}").exists():  # it ends with the server
            await asyncio.sleep(0.1)
        return [before.tokens, after.tokens]

    assert asyncio.run(asyncio.wait_for(serve_and_kill(), PATIENCE_S)) == [expected, expected]
