"""Small real objects for the laws: tiny models, the slow truth, and drafters that lie, know, or ask for everything."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling, SamplingTable, pick
from foreword.core.state import State
from foreword.core.target import Target
from foreword.engine.request import Request
from foreword.model.model import Model

VOCABULARY = 48
END = 2

_SHAPE = dict(
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
FAMILIES = ("llama", "qwen3")


@lru_cache
def tiny(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model of a family, never changed by a test."""
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=False))
    return model.to(dtype).eval()


def target(family: str = "llama", dtype: torch.dtype = torch.float64) -> Model:
    return Model(tiny(family, dtype), name=f"tiny-{family}")


def truth(model: PreTrainedModel, request: Request, context: int = 256) -> list[int]:
    """What plain decoding must write: the whole text through the transformers model for every token, no cache, no draft."""
    text = list(request.prompt)
    sampling = request.sampling
    ends = torch.tensor([END])
    table = SamplingTable.empty(1, ends)
    floor = len(text) + request.min_new_tokens if request.min_new_tokens else 0
    table.set(0, sampling, floor)
    rows = table.at(torch.tensor([0]), (0,))
    limit = min(len(text) + request.max_new_tokens, context)
    with torch.no_grad():
        while len(text) < limit:
            logits = model(input_ids=torch.tensor([text])).logits[:, -1:].double()
            seen = torch.tensor(text).bincount(minlength=logits.shape[-1]).view(1, 1, -1)
            token = int(pick(logits, torch.tensor([[len(text)]]), rows, seen))
            text.append(token)
            if token == END and not request.ignore_eos:
                break
    return text[len(request.prompt) :]


def prompts(count: int, seed: int = 0, longest: int = 24) -> list[tuple[int, ...]]:
    """Random prompts of different lengths, one token long the first."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, *torch.randint(2, longest, (count - 1,), generator=generator).tolist()]
    return [tuple(torch.randint(3, VOCABULARY, (size,), generator=generator).tolist()) for size in sizes]


SAMPLINGS = {"greedy": Sampling(seed=0), "T=0.8": Sampling(temperature=0.8, seed=7)}


class Liar(Drafter):
    """Proposes a tree of random tokens: nearly everything it says is wrong."""

    paper = "-"

    def __init__(self, nodes: int = 9, seed: int = 0) -> None:
        self.nodes, self.generator = nodes, torch.Generator().manual_seed(seed)

    def bind(self, target: Target, slots: int) -> None:
        self.shape = Shape(self.nodes, self.nodes - 1)
        self.vocabulary = target.vocab_size

    def propose(self, state: State) -> Draft:
        batch = len(state.lanes.ids)
        tokens = torch.randint(0, self.vocabulary, (batch, self.nodes), generator=self.generator)
        tokens[:, 0] = state.root
        size = torch.randint(1, self.nodes + 1, (batch,), generator=self.generator)
        return Draft(tokens, random_tree(batch, self.nodes, self.generator), size)


class Oracle(Drafter):
    """Knows the truth beforehand, and hides it in a random tree of lies: the true chain lies scattered among the rows."""

    paper = "-"

    def __init__(self, texts: dict[int, list[int]], depth: int = 4, lies: int = 5, seed: int = 0) -> None:
        """`texts`: for the first prompt token of a sequence, its whole text."""
        self.texts, self.depth, self.lies = texts, depth, lies
        self.generator = torch.Generator().manual_seed(seed)

    def bind(self, target: Target, slots: int) -> None:
        self.shape = Shape(1 + self.depth + self.lies, self.depth + self.lies)
        self.vocabulary = target.vocab_size

    def propose(self, state: State) -> Draft:
        rows = [self._row(state, lane) for lane in range(len(state.lanes.ids))]
        tokens = torch.tensor([row[0] for row in rows])
        parent = torch.tensor([row[1] for row in rows])
        return Draft(tokens, Tree(parent), torch.full((len(rows),), self.shape.nodes))

    def _row(self, state: State, lane: int) -> tuple[list[int], list[int]]:
        length, nodes = int(state.length[lane]), self.shape.nodes
        text = self.texts[int(state.tokens[state.slots[lane], 0])]
        true = text[length + 1 : length + 1 + self.depth]
        true += [0] * (self.depth - len(true))
        places = (torch.randperm(nodes - 1, generator=self.generator)[: self.depth] + 1).sort().values.tolist()
        tokens = torch.randint(0, self.vocabulary, (nodes,), generator=self.generator).tolist()
        parent = [int(torch.randint(0, max(i, 1), (1,), generator=self.generator)) for i in range(nodes)]
        tokens[0] = int(state.root[lane])
        above = 0
        for place, token in zip(places, true, strict=True):
            tokens[place], parent[place], above = token, above, place
        return tokens, parent


def random_tree(batch: int, nodes: int, generator: torch.Generator) -> Tree:
    draws = torch.rand(batch, nodes, generator=generator)
    return Tree((draws * torch.arange(nodes).clamp(min=1)).long())


def same_tree(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(one, other))
