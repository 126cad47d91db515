"""Headers of GGUF files: every length is compared with the file before anything of that length is allocated."""

import random
import resource
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foreword.errors import ForewordError, ModelCorrupt
from foreword.hub.gguf import convert
from foreword.hub.gguf_header import read_header

gguf = pytest.importorskip("gguf")

MEMORY = 16 << 20  # bytes that reading and converting a tiny file may take
FLIPS = 300


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, length: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + values


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def whole(fields: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def found(content: bytes, folder: Path) -> Any:
    path = folder / "a.gguf"
    path.write_bytes(content)
    return read_header(path)


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY


def test_fields_and_tensors_are_read(tmp_path: Path) -> None:
    fields = [
        field("number", 4, struct.pack("<I", 7)),
        field("small", 6, struct.pack("<f", 0.5)),
        field("yes", 7, b"\1"),
        field("text", 8, text("café")),
        field("numbers", 9, array(5, 2, struct.pack("<2i", -1, 4))),
        field("texts", 9, array(8, 2, text("a") + text(""))),
    ]
    data = struct.pack("<6f", *range(6)) + bytes(8) + struct.pack("<2f", 8, 9)
    header = found(whole(fields, [tensor("a", (2, 3)), tensor("b", (2,), offset=32)], data), tmp_path)
    values = {"number": 7, "small": 0.5, "yes": True, "text": "café", "numbers": [-1, 4], "texts": ["a", ""]}
    assert header.fields == values and list(header.tensors) == ["a", "b"]
    assert header.tensors["a"].shape == (2, 3) and header.tensors["a"].elements == 6
    assert header.tensors["a"].data.view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert header.tensors["b"].data.view("<f4").tolist() == [8, 9]


ALIGNED = field("general.alignment", 4, struct.pack("<I", 3))
LIES = {
    "it does not begin as one": b"PK" * 40,
    "from byte 0 on, but it has": b"GG",
    "of version 9": whole([], [], version=9),
    "big-endian": whole([], [], version=3 << 24),
    "^8 bytes are needed": whole([], [])[:8] + struct.pack("<QQ", 0, 2**63),
    "a string has 9223372036854775808 bytes": whole([struct.pack("<Q", 2**63)], []),
    "a string has 16777217 bytes": whole([field("a", 8, struct.pack("<Q", (1 << 24) + 1))], []),
    "a list has 18446744073709551615 items": whole([field("a", 9, array(0, 2**64 - 1))], []),
    "a list has 4194305 items": whole([field("a", 9, array(0, (1 << 22) + 1))], []),
    "4000000 bytes are needed": whole([field("a", 9, array(0, 4_000_000))], []),
    "a list holds values of kind 9": whole([field("a", 9, array(9, 4_000_000))], []),
    "a field is of kind 77": whole([field("a", 77, b"")], []),
    "can't decode": whole([field("a", 8, struct.pack("<Q", 1) + b"\xff")], []),
    "the field a is there twice": whole([field("a", 7, b"\1"), field("a", 7, b"\1")], []),
    "the tensor a is there twice": whole([], [tensor("a", (1,)), tensor("a", (1,))], bytes(64)),
    "has 0 dimensions": whole([], [tensor("a", ())], bytes(64)),
    "has 5 dimensions": whole([], [tensor("a", (1, 1, 1, 1, 1))], bytes(64)),
    "is empty": whole([], [tensor("a", (3, 0))], bytes(64)),
    "begins at byte 32 of the data, but must begin at 0": whole([], [tensor("a", (8,), offset=32)], bytes(64)),
    "begins at byte 64 of the data, but must begin at 32": whole(
        [], [tensor("a", (8,)), tensor("b", (8,), offset=64)], bytes(128)
    ),
    "but Q8_0 has blocks of 32": whole([], [tensor("a", (8, 31), kind=8)], bytes(1024)),
    "99 is not a valid": whole([], [tensor("a", (8,), kind=99)], bytes(64)),
    "general.alignment is 3": whole([ALIGNED], []),
    "4611686018427387904000 bytes are needed": whole([], [tensor("a", (1000, 2**60))], bytes(64)),
}


@pytest.mark.parametrize("message", LIES)
@pytest.mark.usefixtures("little_memory")
def test_damaged_headers_are_refused(message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        found(LIES[message], tmp_path)


def header_bytes(path: Path) -> int:
    held = sum(-(-one.data.nbytes // 32) * 32 for one in read_header(path).tensors.values())
    return path.stat().st_size - held


def most_memory() -> int:
    """The peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.usefixtures("little_memory")
def test_a_number_of_layers_that_is_not_there(tiny: Any, write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    content = path.read_bytes()
    place = content.index(b"llama.block_count") + len("llama.block_count") + 4
    for bit in range(32):
        harmed = bytearray(content)
        harmed[place + bit // 8] ^= 1 << bit % 8
        path.write_bytes(harmed)
        with pytest.raises(ModelCorrupt, match="block_count is .*fetch"):
            convert(path, tmp_path / "out")


def test_flipped_bits_are_answered_with_an_error_or_a_model(
    tiny: Any, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """No other error is raised, and no more memory is taken, whatever a header says."""
    path, dice = write_gguf(tmp_path / "m.gguf", tiny("llama", num_hidden_layers=1)), random.Random(0)
    content, size = path.read_bytes(), header_bytes(path)
    refused, before = 0, most_memory()
    for _ in range(FLIPS):
        harmed = bytearray(content)
        for place in dice.choices(range(size), k=dice.choice((1, 1, 1, 5))):
            harmed[place] = dice.choice((harmed[place] ^ 1 << dice.randrange(8), dice.randrange(256), 0, 255))
        path.write_bytes(harmed)
        try:
            convert(path, tmp_path / "out")
        except ForewordError:
            refused += 1
    assert FLIPS // 2 < refused < FLIPS
    assert most_memory() - before < 8 * MEMORY


WRONG: list[Any] = [0, 2**32 - 1, True, 1e38, float("nan"), "x", ["a"], [1]]
SIZES = ["block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.key_length"]


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("key", SIZES)
def test_an_impossible_size_is_named(
    key: str, value: Any, tiny: Any, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama", num_hidden_layers=2), fields={f"llama.{key}": value})
    with pytest.raises(ModelCorrupt, match=r"m\.gguf.*fetch"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("field_name", "value", "message"),
    [
        ("llama.attention.head_count", 0, r"attention\.head_count is '0', but must be a whole number from 1 on"),
        ("llama.context_length", "long", "context_length is 'long'"),
        ("llama.rope.freq_base", float("inf"), "rope.freq_base is 'inf', but must be a number above 0"),
        ("llama.attention.layer_norm_rms_epsilon", [1.0], "rms_epsilon is"),
        ("tokenizer.ggml.eos_token_id", 340, "eos_token_id is '340', but must be a token from 0 to 339"),
        ("tokenizer.ggml.bos_token_id", "a", "bos_token_id is 'a'"),
        ("tokenizer.ggml.tokens", ["a"] * 341, "the tokenizer has 341 tokens, the embedding 340 rows"),
        ("tokenizer.ggml.tokens", [1], "the tokenizer is damaged"),
        ("tokenizer.ggml.merges", 7, "the tokenizer is damaged"),
        ("tokenizer.ggml.token_type", ["a"], "the tokenizer is damaged"),
        ("tokenizer.chat_template", 5, "the tokenizer is damaged .the chat template is no text"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(
    field_name: str, value: Any, message: str, tiny: Any, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), fields={field_name: value})
    with pytest.raises(ModelCorrupt, match=message):
        convert(path, tmp_path / "out")


def test_a_tensor_of_another_size_is_named(tiny: Any, write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    fields = {"llama.feed_forward_length": 128}
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), fields=fields)
    with pytest.raises(ModelCorrupt, match=r"ffn_\w+\.weight has shape .*but needs .* fields"):
        convert(path, tmp_path / "out")
