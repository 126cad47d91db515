"""SlowModel: a target of an unknown family, run by the forward pass of transformers and nothing of ours.

Every sequence has a pass of its own, and drafts are chains. transformers keeps what it caches; how rejected rows leave that
cache is found by trying: they are cropped, or a copy from before the draft is put back. A model that allows neither reads
its whole sequence again in every pass. A target shows drafters its logits alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from foreword.core.draft import Draft
from foreword.core.needs import Needs, Skip
from foreword.core.scores import Scores
from foreword.core.state import Batch
from foreword.errors import DrafterError, ForewordWarning, InputError, ModelUnsupported
from foreword.hub.resolve import is_adapter
from foreword.hub.stored import is_stored
from foreword.model.cache import CacheShape, SlotCache
from foreword.model.cost import CostCurve
from foreword.model.families import FAMILIES, family_of
from foreword.model.loading import EXACT_EXPERTS, read_config, read_weights, refuse_several_devices
from foreword.model.model import Model, end_tokens
from foreword.model.obstacles import generates

METHODS = ("plain", "prompt_lookup", "token_recycling")
TRIED = 24  # tokens of the trial
FAR = {True: 1e-3, False: 0.1}  # of the spread of the logits, by whether the dtype is wide: more than rounding explains
UNKNOWN_CONTEXT = 2**20  # of a model whose config names no limit
FLAT = CostCurve((1, 64), (1.0, 1.0))
ROTARY_BY_LENGTH = {"dynamic", "longrope"}
PARTS = ("family", "layer_stack", "hidden_size", "attention_heads", "_uncached", "_draft_linears")


class Reader(Protocol):
    """Reads a sequence, and keeps what transformers caches of it."""

    how: ClassVar[str]
    hf: Any

    def __init__(self, hf: Any) -> None: ...

    def read(self, tokens: list[int], length: int) -> Tensor:
        """Return the logits of the tokens after the first `length`, which were read before as they are now."""


class Cropped:
    """Rows that do not count any more are cropped."""

    how: ClassVar[str] = "rejected rows are cropped from its cache"

    def __init__(self, hf: Any) -> None:
        self.hf, self.rows = hf, 0
        self.cache = DynamicCache()  # without a config no layer drops the rows that have left its window

    def read(self, tokens: list[int], length: int) -> Tensor:
        if self.rows > length:
            self.cache.crop(length - self.rows)
            self.rows = length
        logits = _forward(self.hf, tokens[self.rows :], self.cache)
        read, self.rows = self.rows, len(tokens)
        return logits[length - read :]


class Copied:
    """The cache is copied before a pass over several rows. If some of them do not count, the copy comes back, and those that
    do are read again."""

    how: ClassVar[str] = "its cache is copied before each draft, and after a rejection the accepted tokens are read again"

    def __init__(self, hf: Any) -> None:
        self.hf, self.rows, self.cache = hf, 0, DynamicCache(config=hf.config)
        self.kept: tuple[int, DynamicCache] | None = None

    def read(self, tokens: list[int], length: int) -> Tensor:
        if self.rows > length:
            kept = self.kept if self.kept is not None and self.kept[0] <= length else None
            self.rows, self.cache = kept or (0, DynamicCache(config=self.hf.config))
        if self.rows < length:
            _forward(self.hf, tokens[self.rows : length], self.cache)
        self.kept = (length, copy.deepcopy(self.cache)) if len(tokens) - length > 1 else None
        self.rows = len(tokens)
        return _forward(self.hf, tokens[length:], self.cache)


class Reread:
    """Nothing is cached."""

    how: ClassVar[str] = "without a cache: every pass reads the whole sequence again"

    def __init__(self, hf: Any) -> None:
        self.hf = hf

    def read(self, tokens: list[int], length: int) -> Tensor:
        return _forward(self.hf, tokens, None, len(tokens) - length)


@torch.no_grad()
def _forward(hf: Any, tokens: list[int], cache: DynamicCache | None, last: int = 0) -> Tensor:
    """Return the logits [n, V] of tokens after the cached ones, or only the `last` of them."""
    options: dict[str, Any] = {"use_cache": False} if cache is None else {"past_key_values": cache, "use_cache": True}
    if last and "logits_to_keep" in signature(hf.forward).parameters:
        options["logits_to_keep"] = last
    logits: Tensor = hf(input_ids=torch.tensor([tokens], device=hf.device), **options).logits[0]
    return logits[-last:]


def reader_of(hf: Any) -> type[Reader]:
    """Return the fastest way to read sequences that gives what a pass over all of their tokens gives."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = hf.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(vocabulary, (TRIED,), generator=generator).tolist()
    whole = _forward(hf, tokens, None)
    if whole.isfinite().all() and not _agree(_forward(hf, tokens[: TRIED // 2], None), whole[: TRIED // 2]):
        raise ModelUnsupported(
            f"{hf.config.model_type}: what it answers after a token depends on later tokens, so a draft would change the "
            "output; use a model with causal attention"
        )
    readers: tuple[type[Reader], ...] = Cropped, Copied
    for reader in readers:
        with suppress(Exception):  # a cache that nobody tried may fail in any way
            if _reads_as(whole, reader(hf), tokens):
                return reader
    return Reread


def _reads_as(whole: Tensor, reader: Reader, tokens: list[int]) -> bool:
    """Read a prompt, drafts of which all, some or no tokens are accepted, and single tokens."""
    wrong = tokens[::-1]
    passes = [(0, 9, 9), (9, 9, 13), (9, 13, 13), (11, 16, 16), (16, 17, 17), (17, 19, 23), (19, 20, 20), (20, 24, 24)]
    found = []
    for length, right, stop in passes:
        answer = reader.read([*tokens[:right], *wrong[right:stop]], length)[: right - length]
        found.append(_agree(answer, whole[length:right]))
    return all(found)


def _agree(found: Tensor, expected: Tensor) -> bool:
    if not found.numel():
        return True
    far = (found.double() - expected.double()).abs().max() / expected.double().std()
    return bool(far < FAR[expected.dtype.itemsize >= 4])  # a NaN does not agree


class SlowCache(SlotCache):
    """What transformers caches of each slot, and the tokens that were read. As in any cache, rows past `length` are
    scratch. No rows are allocated."""

    def __init__(self, hf: Any, reader: type[Reader], slots: int, context: int, scratch: int) -> None:
        super().__init__(CacheShape(0, 0, 0, hf.dtype), slots, context, scratch, hf.device)
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.readers = [reader(hf) for _ in range(slots)]

    def read(self, slot: int, length: int, tokens: list[int]) -> Tensor:
        """Return the logits [n, V] of tokens after the first `length` rows of a slot. A row that was never read is token 0,
        as memory of a new cache is: timings set a length and read nothing."""
        held = (*self.tokens[slot][:length], *(0,) * (length - len(self.tokens[slot])))
        self.tokens[slot] = [*held, *tokens]
        return self.readers[slot].read(self.tokens[slot], length)

    def copy(self, source: int, slot: int, rows: int) -> None:
        super().copy(source, slot, rows)
        self.tokens[slot] = self.tokens[source][:rows]
        kept = self.readers[source]
        new = type(kept)(kept.hf)
        if isinstance(kept, Cropped) and isinstance(new, Cropped):  # the others read the rows again
            new.cache, new.rows = copy.deepcopy(kept.cache), kept.rows
        self.readers[slot] = new

    def is_sound(self, slot: int, rows: int) -> bool:
        """Nothing looks into the caches of transformers, so the rows of an aborted request are never reused."""
        return False

    def wipe(self, slot: int, first: int = 0, stop: int | None = None) -> None:
        """Forget rows."""
        self.tokens[slot] = self.tokens[slot][:first]
        self.readers[slot] = type(self.readers[slot])(self.readers[slot].hf)


class SlowModel(Model):
    """A `core.Target` that is the forward pass of transformers."""

    def __init__(self, hf: PreTrainedModel, name: str | None = None, reader: type[Reader] | None = None) -> None:
        config = hf.config.get_text_config(decoder=True)
        self._was_training = hf.training
        self.hf = hf.eval()
        self.device, self.dtype = hf.device, hf.dtype
        self.name = f"{(name or hf.config.name_or_path or hf.config.model_type).removesuffix(' (slow)')} (slow)"
        self.vocab_size: int = config.vocab_size
        self.repeats = 1
        self.layers: int = getattr(config, "num_hidden_layers", 1)
        self.ends = torch.tensor(end_tokens(hf, self.vocab_size), dtype=torch.long, device=self.device)
        self.max_context: int = getattr(config, "max_position_embeddings", None) or UNKNOWN_CONTEXT
        self.context = self.max_context
        self.widened_from = self.cache_memory = self.pieces = self.fingerprint = None
        self.reader = reader or reader_of(hf)
        self.slow = f"by the forward pass of transformers; {self.reader.how}"
        self.curve = FLAT if self.reader is Reread else None  # reading a sequence again costs the same for any draft
        self._cache: SlowCache | None = None

    @property
    def ranks(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        if name in PARTS:
            raise ModelUnsupported(
                f"{self.name} runs by the forward pass of transformers, which shows its logits alone; what was asked for "
                f"needs its layers. The methods {', '.join(METHODS)} run"
            )
        raise AttributeError(name)

    @property
    def cache(self) -> SlowCache:
        assert self._cache is not None, "allocate() comes first"
        return self._cache

    def allocate(self, slots: int, context: int, scratch: int) -> SlowCache:
        self.context = context
        self._cache = SlowCache(self.hf, self.reader, slots, context, scratch)
        return self._cache

    @contextmanager
    def temporary_cache(self, slots: int, context: int, scratch: int) -> Iterator[SlotCache]:
        held, before = self._cache, self.context
        try:
            yield self.allocate(slots, context, scratch)
        finally:
            self._cache, self.context = held, before

    def with_own_cache(self, cache_memory: object = None) -> SlowModel:
        return SlowModel(self.hf, self.name, self.reader)

    def release(self) -> None:
        self._cache = None
        self.hf.train(self._was_training)

    def norm(self, hidden: Tensor) -> Tensor:
        """The last states that a slow target shows are its logits."""
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        return hidden

    def score(
        self,
        batch: Batch,
        draft: Draft,
        needs: Needs,
        skip: Skip | None = None,
        rows: range | None = None,
        logits: Literal["all", "none"] = "all",
    ) -> Scores:
        """Run one pass for each sequence over its chain."""
        if not draft.tree.is_chain or draft.early or needs.taps or needs.grafts or skip is not None or rows is not None:
            raise DrafterError(
                f"{self.name} verifies chains and shows its logits alone; the methods {', '.join(METHODS)} run on it"
            )
        lengths = batch.take(self.cache.length).tolist()
        sizes, tokens, found = draft.size.tolist(), draft.tokens.tolist(), []
        for slot, length, size, of_slot in zip(batch.slots.tolist(), lengths, sizes, tokens, strict=True):
            answer = self.cache.read(slot, length, of_slot[:size]) if size else torch.zeros(0, self.vocab_size)
            found.append(pad(answer.to(self.device, self.dtype), (0, 0, 0, draft.nodes - size)))
        answers = torch.stack(found)
        return Scores(logits=answers if logits == "all" else None, hidden=answers if needs.hidden else None)


def load_slow(folder: Path, device: torch.device, dtype: torch.dtype, name: str | None = None) -> SlowModel:
    """Load a model of a family that Foreword does not support, and say how it runs."""
    if is_adapter(folder) or is_stored(folder):
        what = "an adapter" if is_adapter(folder) else "a converted GGUF file"
        raise InputError(f"{folder} holds {what}, which slow=True does not read; give a folder that transformers saved")
    config = read_config(folder)
    check_slow(config)
    has_experts = hasattr(config, "num_experts_per_tok")
    exact = {"experts_implementation": EXACT_EXPERTS} if dtype == torch.float64 and has_experts else {}
    model = SlowModel(read_weights(folder, config, dtype, None, exact).to(device), name)
    warn_of(model)
    return model


def wrap_slow(hf: Any) -> SlowModel:
    """Return a model in memory as a slow target."""
    if not isinstance(hf, PreTrainedModel) or not hf.can_generate():
        raise ModelUnsupported(
            f"wrap takes a transformers causal language model, got {type(hf).__module__}.{type(hf).__name__}"
        )
    check_slow(hf.config)
    refuse_several_devices(hf)
    model = SlowModel(hf)
    warn_of(model)
    return model


def warn_of(model: SlowModel) -> None:
    warnings.warn(
        f"{model.name}: a model of type {model.hf.config.model_type} runs {model.slow}; drafts are chains",
        ForewordWarning,
        stacklevel=4,
    )


def check_slow(config: Any) -> None:
    """Refuse what need not run slow, and what would not be exact."""
    if config.model_type in FAMILIES and _is_supported(config):
        raise InputError(
            f"slow=True is for families that Foreword does not support, and it runs {config.model_type} itself: faster, and "
            "with every method; leave slow out"
        )
    if not generates(config):
        raise ModelUnsupported(
            f"transformers has no causal language model of type {config.model_type!r}, so it cannot run slow"
        )
    text = config.get_text_config(decoder=True)
    tables = getattr(text, "rope_parameters", None) or {}
    for table in (tables, *(one for one in tables.values() if isinstance(one, dict))):
        if table.get("rope_type") in ROTARY_BY_LENGTH:
            raise ModelUnsupported(
                f"{config.model_type}: rotary scaling {table['rope_type']!r} changes the angles of all rows of a pass while "
                "the sequence grows, so a rejected draft could change the output; it is refused with slow=True too"
            )


def _is_supported(config: Any) -> bool:
    try:
        family_of(config)
    except ModelUnsupported:
        return False
    return True
