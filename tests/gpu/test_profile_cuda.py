"""On a CUDA device: every section of a profile has its figures, with captured and with eager rounds."""

from pathlib import Path

import pytest

from foreword.bench import profile as profile_module
from foreword.bench.profile import Profile, ProfileSettings, attempt, failures, random_subject
from foreword.model.shapes import SHAPES

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TINY = dict(
    hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=512,
    vocab_size=1000, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("graph", [True, False], ids=["captured", "eager"])
def test_every_section(graph: bool, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(profile_module, "GPU_BUFFER", 256 * 2**20)
    subject = random_subject("tiny", 2, device="cuda", dtype=dtype, max_context=512, cuda_graphs=graph)
    settings = ProfileSettings(rows=(1, 16), contexts=(64, 300), context=200, tokens=64, repeats=8)
    found = {name: attempt(section) for name, section in Profile(subject, settings).sections.items()}
    assert not failures(found)
    assert 1e11 < found["machine"]["bytes_per_second"] < 1e14
    for one in found["passes"]:
        assert 0 < one["share"] < 1.5 and one["ms"] > 0
    for one in found["rounds"]:
        assert one["device_ms"] > 0 and 0 <= one["host_share"] < 1 and one["prefill_ms"] >= 0
        assert (one["kernels"] is None) != graph
        if graph:
            starts = [kernel["at_us"] for kernel in one["kernels"]]
            assert len(starts) > 20 and starts[0] == 0 and starts == sorted(starts)
    for one in found["parts"]:
        for group in ("products", "head", "attention", "sampling and accept"):
            assert one["groups"][group]["ms"] > 0
