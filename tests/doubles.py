"""Small real objects for the laws: tiny models, the slow truth, and drafters that lie, know, play back or write down.

The truth comes from the transformers model alone: the whole text through it for every token, no cache and no draft of
ours. Only `pick` is shared with the engine; tests/unit/core compares it with a slow reference of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import eager_mask
from transformers.models.gemma2 import modeling_gemma2

from foreword.core.choosing import History, pick
from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.loop import Loop
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import NO_TOKEN, SamplingStages, SamplingTable
from foreword.core.scores import Accepted, Emission, Scores
from foreword.core.state import Batch, State
from foreword.core.target import Target
from foreword.engine.engine import Engine
from foreword.engine.graph import GraphBucket, GraphedLoop, graphed
from foreword.engine.request import Request
from foreword.methods import METHODS, make, trained_as, untrained
from foreword.model.attention import attend, mask_of
from foreword.model.model import Model
from foreword.model.widened import grow
from foreword.text import Tokenizer

VOCABULARY = 48
END = 2
CONTEXT = 64
SAMPLINGS = {"greedy": Sampling(seed=0), "T=0.8": Sampling(temperature=0.8, seed=7)}

_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=END,
    bos_token_id=1,
    pad_token_id=0,
    # Large random weights: a tiny model at the usual scale answers almost the same logits everywhere.
    initializer_range=0.3,
)

# What shows a family's differences: windows shorter than the texts, factors that are not 1, a layer without positions.
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": dict(tie_word_embeddings=True),
    "mistral": dict(sliding_window=6, head_dim=16),
    "qwen2": dict(use_sliding_window=True, sliding_window=5, max_window_layers=2, tie_word_embeddings=True),
    "qwen3": dict(head_dim=16, tie_word_embeddings=False),
    "smollm3": dict(use_sliding_window=True, sliding_window=6, no_rope_layers=[1, 0, 1, 0]),
    "phi3": dict(
        sliding_window=7,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "granite": dict(
        embedding_multiplier=2.5, residual_multiplier=0.7, attention_multiplier=0.6, logits_scaling=0.4, attention_bias=True
    ),
    "olmo2": dict(tie_word_embeddings=False),
    "gemma2": dict(
        head_dim=16, sliding_window=5, query_pre_attn_scalar=3, attn_logit_softcapping=2.0, final_logit_softcapping=6.0
    ),
    "gemma3_text": dict(
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        query_pre_attn_scalar=3,
        final_logit_softcapping=9.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    ),
}
EVERY_FAMILY = tuple(_CHANGES)
STOCK_ATTENTION = {family: "eager" if family == "gemma2" else "sdpa" for family in EVERY_FAMILY}  # sdpa has no caps
FAMILIES = ("llama", "qwen3", "smollm3", "gemma2")
"""What the laws go over: a plain one, norms on q and k, layers without positions and with windows, caps and four norms."""


# Models ----------------------------------------------------------------------------------------------------------------


class ExactNorm(nn.Module):
    """RMSNorm in the dtype of its input: transformers' own rounds to float32, which would blur a float64 comparison."""

    weight: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        gemma = hasattr(self, "eps")  # whose weight is what is added to one
        epsilon: Any = self.eps if gemma else self.variance_epsilon
        weight = 1 + self.weight if gemma else self.weight
        return weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)


def exact_eager(module: nn.Module, *rows: Any, **options: Any) -> Any:
    """Gemma's own eager attention, which has the cap, without its rounding to float32."""
    rounded = functional.softmax
    functional.softmax = lambda scores, dim, dtype: rounded(scores, dim)
    try:
        return modeling_gemma2.eager_attention_forward(module, *rows, **options)
    finally:
        functional.softmax = rounded


AttentionInterface.register("exact_eager", exact_eager)
AttentionMaskInterface.register("exact_eager", eager_mask)


def fresh(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of a family, for a test to change."""
    torch.manual_seed(seed)
    attention = changes.pop("attn_implementation", STOCK_ATTENTION[family])
    config = AutoConfig.for_model(family, **_SHAPE | _CHANGES[family] | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            nn.init.uniform_(module.weight, 0.5, 1.5)  # a norm of ones would hide that it was lost
            if dtype == torch.float64:
                module.__class__ = ExactNorm
        elif getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias, std=0.3)  # as would a bias of zeros
    if family == "gemma2" and dtype == torch.float64:
        model.config._attn_implementation = "exact_eager"
    return model.to(dtype).eval()


GROWING_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "a head of its own": ("llama", {"tie_word_embeddings": False}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a key head each": ("llama", {"num_key_value_heads": 4}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 16}),
    "a large epsilon": ("llama", {"rms_norm_eps": 0.3}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
}
"""Models that can be grown."""


def grown_pair(dtype: torch.dtype, times: int, kind: str = "tied") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random model, and the same `times` as wide."""
    family, changes = GROWING_KINDS[kind]
    model = fresh(family, dtype, **changes).requires_grad_(False)
    wide = grow(model, times)
    if dtype == torch.float64:  # the grown model is made anew, with norms that round to float32
        for module in wide.modules():
            if "RMSNorm" in type(module).__name__:
                module.__class__ = type(model.model.norm)
    return model, wide


@lru_cache
def tiny(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model of a family, never changed by a test."""
    return fresh(family, dtype, seed)


def target(family: str = "llama", dtype: torch.dtype = torch.float64) -> Model:
    """A Model with a cache of its own around the shared tiny one."""
    return Model(tiny(family, dtype), name=f"tiny-{family}")


# The slow truth --------------------------------------------------------------------------------------------------------


_TEXTS: dict[tuple[Any, ...], list[int]] = {}  # what has been written so far; grown as far as a test asks


def truth(model: PreTrainedModel, request: Request, context: int = CONTEXT, ends: tuple[int, ...] = (END,)) -> list[int]:
    """What plain decoding must write: the whole text through the transformers model for every token, no cache, no draft."""
    prompt = list(request.prompt)
    limit = min(len(prompt) + request.max_new_tokens, context)
    floor = len(prompt) + request.min_new_tokens if request.min_new_tokens else 0
    held = request.stop_token_ids if floor else ()
    text = _TEXTS.setdefault((model, request.prompt, request.sampling, floor, ends, held), prompt)
    for place in range(len(request.prompt), limit):
        if place == len(text):
            text.append(_next(model, text, len(request.prompt), request.sampling, floor, ends, held))
        if text[place] in ends and not request.ignore_eos:
            return text[len(request.prompt) : place + 1]
    return text[len(request.prompt) : limit]


def _next(
    model: Any,
    text: list[int],
    prompt: int,
    sampling: Sampling,
    floor: int,
    ends: tuple[int, ...],
    held: tuple[int, ...],
) -> int:
    table = SamplingTable.empty(1, torch.tensor(ends, dtype=torch.long), model.config.vocab_size)
    table.set(0, sampling, floor, held)
    logits = own_logits(model, text)[-1:].unsqueeze(0)
    rows = table.at(torch.tensor([0]), (0,))
    return int(pick(logits, torch.tensor([[len(text)]]), rows, _history(text, prompt, rows.kind, logits.shape[-1])))


def _history(text: list[int], prompt: int, kind: SamplingStages, vocabulary: int) -> History:
    """Counts of the text and of what comes after its prompt, and its last tokens."""
    seen, generated = (torch.tensor(part, dtype=torch.long).bincount(minlength=vocabulary) for part in (text, text[prompt:]))
    padded, count = [NO_TOKEN] * kind.bad_word_length + text, kind.bad_word_length - 1
    last = torch.tensor(padded[-count:]).view(1, 1, -1) if kind.bad_words else None
    return History(seen.view(1, 1, -1), generated.view(1, 1, -1), last)


def full_text(model: PreTrainedModel, request: Request, beyond: int = 8) -> list[int]:
    """Prompt and truth, written on past its end by `beyond` tokens: what an oracle drafts from."""
    longer = replace(request, max_new_tokens=request.max_new_tokens + beyond, ignore_eos=True, stream=None)
    return [*request.prompt, *truth(model, longer, context=2 * CONTEXT)]


@torch.no_grad()
def own_logits(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """[n, V]: the transformers model's own answer."""
    return model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0].double()


@torch.no_grad()
def own_hidden(model: PreTrainedModel, text: Sequence[int]) -> list[Tensor]:
    """After 0 .. L decoder layers of the transformers model, before its final norm: each [n, H]."""
    kept: list[Tensor] = []
    layers = model.model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda _, given: kept.append(given[0][0]))]
    hooks += [layer.register_forward_hook(lambda _, __, out: kept.append(out[0])) for layer in layers]
    own_logits(model, text)
    for hook in hooks:
        hook.remove()
    return kept


@torch.no_grad()
def own_cache(model: PreTrainedModel, text: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The transformers model's own keys and values of a text, by layer: each [heads, n, width]."""
    cache = DynamicCache()  # not told of windows, so it forgets nothing
    model(input_ids=torch.tensor([list(text)]), past_key_values=cache, use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def own_window(model: PreTrainedModel, layer: int) -> int | None:
    """How many positions transformers lets a row of a layer see: some families say it of the layer, some of all."""
    return getattr(model.model.layers[layer].self_attn, "sliding_window", getattr(model.config, "sliding_window", None))


POISON = 7


def poisoned_model() -> PreTrainedModel:
    """One token's embedding is NaN: who has it in the prompt gets NaN, and nobody else."""
    hf = fresh("qwen3")
    with torch.no_grad():
        hf.model.embed_tokens.weight[POISON] = torch.nan
    return hf


# Text -----------------------------------------------------------------------------------------------------------------


@lru_cache
def tokenizer() -> Tokenizer:
    """Two letters a token, so that a stop string may begin and end inside one."""
    pieces = ["<pad>", "<s>", "</s>", *(chr(97 + i % 7) + chr(97 + i // 7) for i in range(VOCABULARY - 3))]
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


# Requests and engines --------------------------------------------------------------------------------------------------


def prompts(count: int, seed: int = 0, longest: int = 24) -> list[tuple[int, ...]]:
    """Random prompts of different lengths, one token long the first."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, *torch.randint(2, longest, (count - 1,), generator=generator).tolist()]
    return [tuple(torch.randint(3, VOCABULARY, (size,), generator=generator).tolist()) for size in sizes]


def requests(count: int, sampling: Sampling = SAMPLINGS["greedy"], seed: int = 0, **options: Any) -> list[Request]:
    """Random prompts as requests, each with a seed of its own."""
    options = {"max_new_tokens": 14} | options
    return [Request(prompt, sampling.derived(i), **options) for i, prompt in enumerate(prompts(count, seed))]


def engine(
    drafter: Drafter, model: Model | None = None, slots: int = 3, context: int = CONTEXT, late: bool = False
) -> Engine:
    """Prompts are read five tokens at a time, so that they come in chunks. Requests that enter together go into slots that
    do not rise, 2, 0 and 1 of three: what belongs to one slot and lands in another shows."""
    made = Engine(model or target(), drafter, slots=slots, max_context=context, chunk=5, late=late)
    made.slots.left = {slot: () for slot in (slots - 1, *range(slots - 1))}
    return made


def written(engine: Engine, asked: Iterable[Request]) -> list[list[int]]:
    return [running.tokens for running in engine.generate(asked)]


def run_to_end(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def rerunning(loop: Loop, drafter: Drafter) -> GraphedLoop:
    """Rounds and prompt passes as on a GPU, in buckets: a replay runs what was captured once more."""
    made = graphed(loop, drafter.captures)
    assert isinstance(made, GraphedLoop)
    made._record = _rerun  # type: ignore[method-assign]
    return made


def _rerun(bucket: GraphBucket[Any], call: Callable[[], Any]) -> None:
    """In place of a capture. The stages of sampling are those of the capture: the first replay comes right after it."""
    kinds: list[SamplingStages] = []
    kind_of = SamplingTable.kind

    def settled(table: SamplingTable, ids: tuple[int, ...]) -> SamplingStages:
        if not kinds:
            kinds.append(kind_of(table, ids))
        return kinds[0]

    def replay() -> None:
        SamplingTable.kind = settled  # type: ignore[method-assign]
        try:
            recorded.answer = call()
        finally:
            SamplingTable.kind = kind_of  # type: ignore[method-assign]

    recorded = SimpleNamespace(replay=replay, answer=None)
    bucket.graph = recorded  # type: ignore[assignment]


def state_of(texts: Sequence[Sequence[int]], sampling: Sampling = SAMPLINGS["greedy"], slots: int | None = None) -> State:
    """Sequences whose texts stand in the slots, the last token of each the root; no model behind them."""
    count = slots or len(texts)
    state = State.empty(count, CONTEXT, torch.zeros(count, dtype=torch.long), torch.tensor([END]))
    for slot, text in enumerate(texts):
        state.tokens[slot, : len(text)] = torch.tensor(list(text))
        state.roots[slot], state.lengths[slot] = text[-1], len(text) - 1
        state.limits[slot], state.heeds_ends[slot] = CONTEXT, True
        state.speculates[slot] = state.alive_slots[slot] = True
        state.table.set(slot, sampling.derived(slot))
    ids = list(range(len(texts)))
    return state.at(Batch.of(ids, max(map(len, texts)) - 1))


def prefilled(model: Model, texts: dict[int, Sequence[int]], slots: int = 4, scratch: int = 32) -> Batch:
    """Texts read into the model's cache, each into its slot, one by one."""
    model.allocate(slots, CONTEXT, scratch)
    for slot, text in texts.items():
        if text:
            batch = Batch.of([slot], 0)
            with torch.no_grad():
                model.score(batch, chain([list(text)]), Needs())
            model.cache.advance(batch, torch.tensor([len(text)]))
    return Batch.of(list(texts), max(map(len, texts.values())))


def chain(tokens: Sequence[Sequence[int]]) -> Draft:
    """Chains of equal length, one a sequence."""
    rows = torch.tensor([list(row) for row in tokens])
    return Draft(rows, Tree.chain(rows.shape[1]), torch.full((rows.shape[0],), rows.shape[1]))


def path_to(parent: Sequence[int], node: int) -> list[int]:
    """Rows from the root to a node, by walking up."""
    path = [node]
    while path[-1] != 0:
        path.append(parent[path[-1]])
    return path[::-1]


def random_tree(batch: int, nodes: int, generator: torch.Generator) -> Tree:
    draws = torch.rand(batch, nodes, generator=generator)
    return Tree((draws * torch.arange(nodes).clamp(min=1)).long())


# Attention -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Looks:
    """Rows of random trees that look at a random cache, with slots in any order and lengths of their own.

    Whatever lies where no row may look, in other slots or behind the scratch, is not a number.
    """

    query: Tensor  # [b, heads, n, width]
    keys: Tensor  # [B, key heads, rows, width]
    values: Tensor
    slots: Tensor  # [b]
    base: Tensor  # [b]
    sees: Tensor  # [b or 1, n, m]
    depth: Tensor  # [b or 1, m]

    @staticmethod
    def drawn(
        heads: tuple[int, int],
        width: int,
        rows: int,
        lengths: Sequence[int],
        before: int = 0,
        shared: bool = False,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Looks:
        """`heads` of queries and of keys; the rows are the last of a tree that has `before` earlier ones."""
        generator = torch.Generator().manual_seed(seed)
        batch, scratch = len(lengths), before + rows
        draws = torch.rand(1 if shared else batch, scratch, generator=generator) ** 0.3  # deep, so that windows matter
        tree = Tree((draws * torch.arange(scratch).clamp(min=1)).long())
        slots = torch.randperm(batch + 2, generator=generator)[:batch]
        cached = torch.full((2, batch + 2, heads[1], max(lengths) + scratch + 3, width), torch.nan, dtype=dtype)
        for slot, length in zip(slots, lengths, strict=True):
            part = cached[:, slot, :, : length + scratch]
            part.copy_(torch.randn(part.shape, generator=generator))
        fused = 2 * torch.randn(batch, rows, heads[0] + 1, width, generator=generator).to(dtype)
        query = fused[:, :, : heads[0]].transpose(1, 2)
        return Looks(query, *cached, slots, torch.tensor(lengths), tree.ancestors[:, before:], tree.depth)

    def to(self, device: str) -> Looks:
        return Looks(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def within(self, window: int) -> Looks:
        """The same, with `sees` closed where a scratch row lies outside the window."""
        far = self.depth[:, -self.sees.shape[1] :].unsqueeze(2) - self.depth.unsqueeze(1) >= window
        return replace(self, sees=self.sees & ~far)

    def exact(self, window: int = 0, softcap: float = 0.0) -> Tensor:
        """The answer in float64: [b, n, heads, width]."""
        batch, heads, rows, width = self.query.shape
        keys, values = (cached[self.slots].nan_to_num().double() for cached in (self.keys, self.values))
        query, groups, column = self.query.double(), heads // keys.shape[1], torch.arange(keys.shape[2], device=keys.device)
        mask = mask_of(self.base, self.sees, keys.shape[2], groups, torch.float64)
        if window:
            length = self.base.view(-1, 1, 1)
            far = (column < length) & (column <= length + self.depth[:, -rows:].unsqueeze(2) - window)
            mask = mask.masked_fill(far.repeat(1, groups, 1).unsqueeze(1), -torch.inf)
        if not softcap:
            return attend(query, keys, values, mask, width**-0.5)
        scores = query.reshape(batch, keys.shape[1], -1, width) @ keys.mT * width**-0.5
        out = (softcap * (scores / softcap).tanh() + mask).softmax(-1) @ values
        return out.reshape(batch, heads, rows, width).transpose(1, 2)


# Drafters --------------------------------------------------------------------------------------------------------------

TRAINED: dict[str, dict[str, Any]] = {
    "medusa": dict(rows=16, heads=3),
    "hydra": dict(rows=40, heads=3, layers=2, prefix=True),
    "clover": dict(rows=16, heads=3, tree="budget", top_p=0.98, floor=0.01),
    "clover2": dict(rows=16, heads=3, taps=(0, 2)),
    "echo": dict(rows=24, heads=3, taps=(0, 2), chain=6),
    "hidden_transfer": dict(rows=32, steps=3, carry="all"),
    "firp": dict(rows=16, steps=3),
    "draft_model": dict(rows=16, depth=3, layers=2),
    "gsd": dict(rows=16, depth=3, layers=2, repeat=0, siblings=0.0, sure=0.0),
    "amusd": dict(rows=4, layers=2, ahead=5, least=3, patience=60.0, worker="thread"),
}
"""Methods that need weights: with which options the laws go over them, as they go over all others. Of amusd the target
waits for all that it checks, so that its drafts are the same every time."""

LEARNERS = [name for name in TRAINED if trained_as(name) == name]
"""Of these the ones that are trained themselves; the others take their drafters."""

READY = [name for name, method in METHODS.items() if not method.trained]
"""Methods that need none: any model can be loaded with them."""


def drafter(name: str, model: Model) -> Drafter:
    """The method as the laws use it."""
    if METHODS[name].trained:
        return taught(name, model, **TRAINED[name])
    return make(name)


def taught(name: str, model: Model, **options: Any) -> Any:
    """A trained method with random weights, the same ones every time; large, so that none of them goes unnoticed."""
    made: Any = untrained(name, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made.prepare(model, 1)
        for weight in made.module.parameters():
            weight.data += torch.randn(weight.shape, dtype=torch.float64).to(weight) * 0.2
    return made


class Liar(Drafter):
    """Proposes a tree of random tokens: nearly everything it says is wrong."""

    paper = "-"

    def __init__(self, nodes: int = 9, seed: int = 0) -> None:
        self.nodes, self.generator = nodes, torch.Generator().manual_seed(seed)

    def bind(self, target: Target, slots: int) -> None:
        self.shape = Shape(self.nodes, self.nodes - 1)
        self.vocabulary = target.vocab_size

    def propose(self, state: State) -> Draft:
        batch = len(state.batch.ids)
        tokens = torch.randint(0, self.vocabulary, (batch, self.nodes), generator=self.generator)
        tokens[:, 0] = state.root
        size = torch.randint(1, self.nodes + 1, (batch,), generator=self.generator)
        return Draft(tokens, random_tree(batch, self.nodes, self.generator), size)


class Oracle(Drafter):
    """Knows the truth beforehand, and hides it in a random tree of lies: the true chain lies scattered among the rows. One
    lie in three repeats a true row, on the same parent: it is right as well, but leads nowhere, and may be the last row.

    Without lies the draft is the true chain alone, declared as a chain or handed over as any tree.
    """

    paper = "-"

    def __init__(
        self, texts: Iterable[Sequence[int]], depth: int = 4, lies: int = 5, seed: int = 0, as_chain: bool = False
    ) -> None:
        """`texts`: whole texts, prompts included; the one that goes on from where a sequence stands is drafted."""
        self.texts, self.depth, self.lies = [list(text) for text in texts], depth, lies
        self.generator = torch.Generator().manual_seed(seed)
        self.as_chain = as_chain and not lies

    def bind(self, target: Target, slots: int) -> None:
        self.shape = Shape(1 + self.depth + self.lies, self.depth + self.lies)
        self.vocabulary = target.vocab_size

    def propose(self, state: State) -> Draft:
        rows = [self._row(text_of(state, index)) for index in range(len(state.batch.ids))]
        tokens = torch.tensor([row[0] for row in rows])
        parent = torch.tensor([row[1] for row in rows])
        tree = Tree.chain(self.shape.nodes) if self.as_chain else Tree(parent)
        return Draft(tokens, tree, torch.full((len(rows),), self.shape.nodes))

    def _row(self, text: list[int]) -> tuple[list[int], list[int]]:
        nodes = self.shape.nodes
        true = continuation(self.texts, text, self.depth)
        places = (torch.randperm(nodes - 1, generator=self.generator)[: self.depth] + 1).sort().values.tolist()
        tokens = torch.randint(0, self.vocabulary, (nodes,), generator=self.generator).tolist()
        parent = [int(torch.randint(0, max(i, 1), (1,), generator=self.generator)) for i in range(nodes)]
        tokens[0] = text[-1]
        above = 0
        for place, token in zip(places, true, strict=True):
            tokens[place], parent[place], above = token, above, place
        for place in [place for place in range(nodes - 1, 0, -1) if place not in places][::3]:
            if twins := [twin for twin in places if twin < place]:
                twin = twins[int(torch.randint(0, len(twins), (1,), generator=self.generator))]
                tokens[place], parent[place] = tokens[twin], parent[twin]
        return tokens, parent


@dataclass(frozen=True)
class Plan:
    """One sequence's draft in one round, told beforehand. A node is (some number, token): the number, modulo the rows
    before it, is its parent; a token of None stands for what the truth has at that depth."""

    nodes: tuple[tuple[int, int | None], ...]
    size: int


class Playback(Drafter):
    """Plays back given plans, one for every sequence and round, over and over: any draft at all."""

    paper = "-"

    def __init__(self, plans: Sequence[Plan], texts: Iterable[Sequence[int]]) -> None:
        self.plans, self.texts, self.played = plans, [list(text) for text in texts], 0

    def bind(self, target: Target, slots: int) -> None:
        nodes = 1 + max(len(plan.nodes) for plan in self.plans)
        self.shape = Shape(nodes, nodes - 1)

    def propose(self, state: State) -> Draft:
        rows = [self._row(text_of(state, index)) for index in range(len(state.batch.ids))]
        tokens, parent, size = zip(*rows, strict=True)
        return Draft(torch.tensor(tokens), Tree(torch.tensor(parent)), torch.tensor(size))

    def _row(self, text: list[int]) -> tuple[list[int], list[int], int]:
        plan = self.plans[self.played % len(self.plans)]
        self.played += 1
        true = continuation(self.texts, text, self.shape.depth)
        tokens, parent, depth = [text[-1]], [0], [0]
        for number, token in plan.nodes:
            above = number % len(tokens)
            parent.append(above)
            depth.append(depth[above] + 1)
            tokens.append(true[depth[-1] - 1] if token is None else token)
        padding = self.shape.nodes - len(tokens)
        return tokens + [0] * padding, parent + [0] * padding, min(plan.size, len(tokens))


@dataclass
class Seen:
    """One call to a drafter: the texts at that time (root included), and what it was told."""

    texts: list[list[int]]
    draft: Draft
    scores: Scores = field(default_factory=Scores)
    accepted: Accepted | None = None
    slots: tuple[int, ...] = ()


class Recorder(Drafter):
    """Stands before another drafter and writes down every call; may ask for more than the other needs."""

    paper = "-"

    def __init__(self, inner: Drafter, needs: Needs | None = None) -> None:
        self.inner, self.asked = inner, needs
        self.proposed: list[Seen] = []
        self.read_calls: list[Seen] = []
        self.observed: list[Seen] = []
        self.began: list[tuple[int, ...]] = []
        self.ended: list[int] = []

    def bind(self, target: Target, slots: int) -> None:
        self.inner.prepare(target, slots)
        self.shape, self.needs = self.inner.shape, self.asked or self.inner.needs

    def begin(self, state: State) -> None:
        self.began.append(state.batch.ids)
        self.inner.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.read_calls.append(Seen(texts_of(state), chunk, scores, slots=state.batch.ids))
        self.inner.read(state, chunk, scores)

    def propose(self, state: State) -> Draft:
        draft = self.inner.propose(state)
        self.proposed.append(Seen(texts_of(state), draft, slots=state.batch.ids))
        return draft

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self.observed.append(Seen(texts_of(state), draft, scores, accepted, state.batch.ids))
        self.inner.observe(state, draft, scores, accepted)

    def decided(self, state: State, emission: Emission) -> None:
        self.inner.decided(state, emission)

    def end(self, slots: Sequence[int]) -> None:
        self.ended += slots
        self.inner.end(slots)


class LastHidden(Drafter):
    """Keeps the hidden state of the last committed row and proposes what the target's head says of it: the least
    drafter that carries state from `read` and `observe` to `propose`."""

    paper = "-"
    needs = Needs(hidden=True, prompt="last")
    shape = Shape(4, 1)

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.hidden = torch.zeros(slots, target.hidden_size, dtype=target.dtype)

    def begin(self, state: State) -> None:
        self.hidden[state.slots] = 0

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.hidden[state.slots] = scores.require_hidden()[:, -1]

    def propose(self, state: State) -> Draft:
        logits = self.target.head(self.target.norm(self.hidden[state.slots]))
        tokens = torch.cat([state.root.unsqueeze(1), logits.topk(3).indices], dim=1)
        return Draft(tokens, Tree.of((0, 0, 0, 0)), torch.full_like(state.root, 4))

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        rows = torch.arange(len(state.batch.ids))
        self.hidden[state.slots] = scores.require_hidden()[rows, accepted.last]


class TwoHeads(LastHidden):
    """A small Trainable: one residual block a head over the last hidden state, the target's own head behind both."""

    def __init__(self, heads: int = 2) -> None:
        self.heads, self.config = heads, {"heads": heads}

    def build(self, target: Target) -> None:
        size = target.hidden_size
        self.module = nn.ModuleList(nn.Linear(size, size) for _ in range(self.heads)).to(target.device, target.dtype)

    def bind(self, target: Target, slots: int) -> None:
        super().bind(target, slots)
        self.shape = Shape(1 + self.heads, self.heads)

    def _logits(self, head: int, hidden: Tensor) -> Tensor:
        rows = self.target.norm(hidden)
        return self.target.head(rows + functional.silu(self.module[head](rows)))

    def propose(self, state: State) -> Draft:
        guesses = [self._logits(head, self.hidden[state.slots]).argmax(-1) for head in range(self.heads)]
        tokens = torch.stack([state.root, *guesses], dim=1)
        return Draft(tokens, Tree.chain(1 + self.heads), torch.full_like(state.root, 1 + self.heads))

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        total, figures = torch.zeros(()), {}
        noise = 1 + 0.01 * torch.randn(())  # a method may draw: a run that goes on must draw the same
        for head in range(self.heads):
            ahead = head + 2  # the row before the root guesses what comes behind the root
            logits = self._logits(head, scores.require_hidden()[:, :-ahead])
            label, counts = tokens[:, ahead:], mask[:, ahead:]
            total = total + noise * functional.cross_entropy(logits[counts], label[counts])
            figures[f"top1/{head + 1}"] = (logits.argmax(-1) == label)[counts].double().mean()
            figures[f"rows/{head + 1}"] = counts.sum()
        return total, figures


@dataclass(frozen=True)
class TextList:
    """Training texts in memory."""

    texts: list[tuple[Tensor, Tensor]]

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(tokens) for tokens, _ in self.texts])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.texts[index]


def text_of(state: State, index: int) -> list[int]:
    return state.tokens[state.slots[index], : int(state.length[index]) + 1].tolist()


def texts_of(state: State) -> list[list[int]]:
    return [text_of(state, index) for index in range(len(state.batch.ids))]


def continuation(texts: Iterable[list[int]], text: list[int], count: int) -> list[int]:
    """What follows `text` in the first of `texts` that begins with it, filled up with zeros."""
    known = next((one[len(text) :] for one in texts if one[: len(text)] == text), [])
    return (known + [0] * count)[:count]


def paths_of(draft: Draft, index: int) -> list[tuple[int, ...]]:
    """The tokens on the way to each row that counts, the root's left out."""
    parent, tokens = draft.tree.parent.expand_as(draft.tokens)[index].tolist(), draft.tokens[index].tolist()
    paths: list[tuple[int, ...]] = [()]
    for row in range(1, int(draft.size[index])):
        assert parent[row] < row
        paths.append((*paths[parent[row]], tokens[row]))
    return paths


def check_yield(recorder: Recorder, model: PreTrainedModel, asked: Iterable[Request]) -> None:
    """Whatever was drafted, every round accepted the deepest of its rows that the truth has, and no more."""
    written = [(list(one.prompt), truth(model, one), full_text(model, one, beyond=CONTEXT)) for one in asked]
    assert len(recorder.proposed) == len(recorder.observed)
    for before, after in zip(recorder.proposed, recorder.observed, strict=True):
        assert after.accepted is not None
        for index, text in enumerate(before.texts):
            left, ahead = next(
                (len(prompt) + len(true) - len(text), tuple(full[len(text) :]))
                for prompt, true, full in written
                if full[: len(text)] == text
            )
            right = [len(path) for path in paths_of(before.draft, index) if ahead[: len(path)] == path]
            assert int(after.accepted.count[index]) == min(max(right) + 1, left), (text, paths_of(before.draft, index))


def drafts_of(seen: Seen) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents that count, sequence by sequence."""
    parent = seen.draft.tree.parent.expand_as(seen.draft.tokens)
    return [
        (seen.draft.tokens[index, :size].tolist(), parent[index, :size].tolist())
        for index, size in enumerate(seen.draft.size.tolist())
    ]
