"""`foreword try` and `foreword models --families`: what runs here, in words and as JSON."""

import json
import shutil

import pytest
import torch

from doubles import fresh
from foreword.model.families import FAMILIES


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    fresh("qwen3_moe", torch.float32).save_pretrained(folder)
    return folder


def test_a_supported_model(run, mixture):
    shown = run("try", str(mixture))
    assert shown.exit_code == 0
    assert shown.stdout.startswith("qwen3_moe: supported; the walk over its layers differs from transformers by ")


def test_a_supported_model_as_json(run, mixture):
    said = json.loads(run("try", str(mixture), "--json").stdout)
    assert said["model_type"] == "qwen3_moe" and said["supported"] and said["line"] is None
    assert 0 <= said["difference"] < 1e-4


def test_a_model_that_is_not_supported(run, mixture, tmp_path):
    shutil.copytree(mixture, tmp_path, dirs_exist_ok=True)
    config = json.loads((mixture / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3", "kv_lora_rank": 8}))
    shown = run("try", str(tmp_path))
    assert shown.exit_code == 1 and shown.stdout.startswith("deepseek_v3: not supported; its attention is latent")


def test_the_families(run):
    lines = run("models", "--families").stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(FAMILIES)]] == list(FAMILIES)
    listed = json.loads(run("models", "--families", "--json").stdout)["families"]
    assert [one["family"] for one in listed] == list(FAMILIES)
    by_name = {one["family"]: one for one in listed}
    assert by_name["llama"]["layers_run_by"] == "our kernels" and "experts" not in by_name["llama"]["bfloat16_differs_at"]
    assert by_name["gpt_oss"]["layers_run_by"] == "transformers, with our attention"
    assert by_name["gpt_oss"]["bfloat16_differs_at"] == "near-ties of tokens and of experts"
