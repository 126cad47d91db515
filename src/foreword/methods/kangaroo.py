"""DRAFT: the target's own first layers, then a small trained adapter, then the target's head.

The first layers run while drafting, on the target's own cache. Their states are kept, and verification runs the other layers
alone: what drafting computed is not computed again. The adapter, one attention with a norm before and a norm after it, reads
these states along the sequence, with a cache of its own. Every drafted token is verified, one path or a few nodes per level.
Training fits the target's distribution.
Paper: Kangaroo (arXiv 2404.18911).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor, nn

from foreword.core.draft import Draft, Shape
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.early_rows import EarlyRows
from foreword.drafting.heads import norm_like
from foreword.drafting.lessons import HeadLosses, Labels, Lesson, check_labels
from foreword.drafting.small_model import KERNELS
from foreword.drafting.trees import BRANCH, LEVEL_KERNELS, USUAL_RATES, Beam, FixedRows, TreePlan
from foreword.errors import DrafterError, InputError
from foreword.model.widening import NORM, layers_at
from foreword.ops.device import fixes_shapes
from foreword.ops.rows import counted

AdapterKind = Literal["attention", "layer"]
EXIT = 16  # one layer of this many is early, two at least: 2 of 32 and 3 of 40, as in the paper


class Adapter(nn.Module):
    """A layer, or its attention alone, and a norm that starts as the target's last."""

    def __init__(self, target: Target, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.norm = layers, norm_like(target)


class Kangaroo(Drafter):
    paper = "Kangaroo, arXiv 2404.18911"
    copies = True
    wide = {"norm": NORM, **layers_at("layers")}
    module: Adapter
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        exit: int | None = None,
        adapter: AdapterKind = "attention",
        depth: int = 6,
        width: int = 8,
        stop: float = 0.0,
        labels: Labels = "soft",
    ) -> None:
        """`exit`: how many layers of the target draft; None: 2 of 32, 3 of 40. `adapter`: an "attention" as in the paper, or
        a whole "layer" of the target's kind. It drafts `depth` tokens ahead, with `width` nodes in every level; 1 is the
        paper's chain. `stop`: a level whose nodes are less likely than this, given the level before, is the last one; 0.6 in
        the paper. `labels`: learn the target's distribution ("soft") or its tokens ("hard")."""
        if exit is not None and (type(exit) is not int or exit < 1):
            raise InputError(f"kangaroo: exit is {exit!r}; it is the number of layers that draft, 1 or more")
        if adapter not in get_args(AdapterKind):
            raise InputError(f"kangaroo: adapter is {adapter!r}; choose from {', '.join(get_args(AdapterKind))}")
        if depth < 1:
            raise InputError(f"kangaroo: depth is {depth}; it must be at least 1")
        check_labels("kangaroo", labels)
        TreePlan("best", rows, width, USUAL_RATES, stop=stop).check("kangaroo")
        self.wants_cost = rows is None
        self.vocabulary = VocabularyHead()
        self.rows, self.depth, self.width, self.stop, self.labels = rows, depth, width, stop, labels
        self.config: dict[str, Any] = {"exit": exit, "adapter": adapter}

    def build(self, target: Target) -> None:
        self.exit = _exit_of(target, self.config["exit"])
        self.config["exit"] = self.exit
        self.stack = target.stack(0, 1, init=self.exit, mlp=self.config["adapter"] == "layer")
        self.module = Adapter(target, self.stack.layers)

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.needs = Needs(hidden=True, taps=(self.exit,), prompt="all")
        self.vocabulary.bind(target)
        self.growth = self._growth(target)
        self.shape = self.growth.shape
        self.stack.allocate(slots, target.context, self.shape.nodes)

    def _growth(self, target: Target) -> Beam:
        tokens = min(self.vocabulary.count, target.vocab_size)
        width = min(self.width, tokens)
        nodes = min(self.rows or 1 + width * self.depth, 1 + width * self.depth)
        most = Shape(nodes, min(self.depth, nodes - 1))
        drafting, level = self._adapter_cost(target), self._level_cost(target)
        fixed = None if self.rows else FixedRows(target, most, drafting=drafting, level=level)
        return Beam(most, width, min(max(BRANCH, width), tokens), self.stop, fixed, exits=not fixes_shapes(target.device))

    def _adapter_cost(self, target: Target) -> float:
        """Return what the adapter costs; a one-row pass of the target costs 1."""
        weights = sum(weight.numel() for weight in self.module.layers.parameters())
        return max(target.read_cost(weights), target.launch_cost(KERNELS))

    def _level_cost(self, target: Target) -> float:
        """Return what a level costs: the first layers, the adapter, and the head."""
        layers = 1 - target.read_cost(target.vocab_size * target.hidden_size)
        first = max(layers * self.exit / target.layers, target.launch_cost(KERNELS * self.exit))
        head = max(self.vocabulary.read_cost(target), target.launch_cost(LEVEL_KERNELS))
        return first + self._adapter_cost(target) + head

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.stack.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        self.stack.restart(state.batch, state.length)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self._follow(state, scores, chunk.size)

    def propose(self, state: State) -> Draft:
        if not self.growth.widths(len(state.batch.ids)):
            return Draft.nothing(state.root)
        rows = EarlyRows(self.target, state, self.exit)

        def guess(level: int) -> tuple[Tensor, Tensor]:
            adapted = self.stack.walk(rows.states[-1], rows.levels.last).hidden
            return self.vocabulary.candidates(
                adapted, state.ahead(level), state.sampling, self.growth.branch, self.module.norm
            )

        return self.growth.draft(state, rows, guess)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self._follow(state, scores, accepted.count, accepted.path)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        marks = HeadLosses(Lesson.of(tokens, mask, 1), target, self.vocabulary, self.labels, scores.require_hidden())
        # An early state has seen its own token, so these rows align with the target's own.
        adapted = marks.lesson.teacher(self.stack.walk_sequences(scores.taps[self.exit]))
        marks.add(1, self.module.norm(adapted), 1.0)
        return marks.result

    def _follow(self, state: State, scores: Scores, count: Tensor, path: Tensor | None = None) -> None:
        """Let the adapter read the committed rows: the first `count` of the pass, taken along `path` if there is one. Those
        of a draft are read once more, since the last level of a draft has not been read."""
        self.stack.read(counted(scores.taps[self.exit], count, path), state.batch, count)


def _exit_of(target: Target, asked: int | None) -> int:
    """Return how many layers draft."""
    layers = min(max(2, -(-target.layers // EXIT)), target.layers - 1) if asked is None else asked
    if not 0 < layers < target.layers:
        found = f"exit is {layers}, and {target.name} has layers 1 to {target.layers}"
        raise DrafterError(f"kangaroo: {found}; at least one has to draft, and one to verify")
    return layers
