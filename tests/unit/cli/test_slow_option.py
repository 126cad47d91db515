"""`--slow`, and models whose files contradict each other: what is said, and the exit status."""

import json

import pytest
import torch

from doubles import byte_tokenizer, fresh


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of a family that Foreword does not support."""
    folder = tmp_path_factory.mktemp("unknown")
    fresh("stablelm", torch.float32, vocab_size=256, eos_token_id=None).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def test_an_unknown_family_answers(run, unknown):
    asked = ("generate", "hi", "--raw", "--model", unknown, "--max-new-tokens", "4", "--json")
    refused = run(*asked)
    assert refused.exit_code == 2 and "slow=True (--slow) runs it" in refused.stderr.replace("\n", " ")
    answer = run(*asked, "--slow", "--rows", "4")
    assert answer.exit_code == 0 and "runs by the forward pass of transformers" in answer.stderr.replace("\n", " ")
    found = json.loads(answer.stdout)
    assert len(found["tokens"]) == 4 and found["model"].endswith("(slow)")


def test_methods_that_need_layers_are_refused(run, unknown):
    refused = run("generate", "hi", "--raw", "--model", unknown, "--slow", "--method", "swift")
    assert refused.exit_code == 2 and "shows drafters its logits alone" in refused.stderr.replace("\n", " ")


def test_proofs_of_all_methods_that_run(run, unknown, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab ab ab\n")
    asked = ("--prompts", str(prompts), "--max-new-tokens", "6", "--rows", "4", "--json")
    proof = run("prove", "--model", unknown, "--slow", *asked)
    assert proof.exit_code == 0
    assert [*json.loads(proof.stdout)["methods"]] == ["prompt_lookup", "token_recycling"]


def test_a_trial_says_how_it_runs(run, unknown, tiny_model):
    verdict = json.loads(run("try", unknown, "--slow", "--json").stdout)
    assert verdict["supported"] and verdict["slow"] and "rejected rows are cropped" in verdict["said"]
    fast = run("try", tiny_model, "--slow")
    assert fast.exit_code == 1 and "runs llama itself" in fast.stdout.replace("\n", " ")


def test_a_config_that_lies_about_its_layers(run, tmp_path):
    hf = fresh("mixtral", torch.float32, vocab_size=256)
    hf.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for layers, said in ((6, "lack"), (3, "have a layer 3, and config.json asks for 3 layers")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        refused = run("generate", "hi", "--raw", "--model", str(tmp_path))
        assert refused.exit_code == 2 and said in refused.stderr.replace("\n", " ")
