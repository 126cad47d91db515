"""Try a family on a model: the walk over its layers against transformers' own forward pass.

In: a transformers model, of a known family or not. Out: the family that its parts suggest, and how far the logits
of the walk are from those of transformers. An unknown model that agrees needs only this line in the table of families.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foreword.core.draft import Draft, Tree
from foreword.core.needs import Needs, Skip
from foreword.core.state import Batch
from foreword.errors import ForewordWarning, InputError, ModelUnsupported
from foreword.model.families import FAMILIES, SLOW, family_of
from foreword.model.family import GLM4_NORM, PARALLEL, POST_NORM, PRE_NORM, SANDWICH_NORM, Family, Norms, Parts, Windows
from foreword.model.loading import load_stock, read_config, read_weights
from foreword.model.model import Model
from foreword.model.obstacles import generates, obstacles
from foreword.model.slow import load_slow
from foreword.model.stack import Stack

AGREEMENT = 1e-3  # of the spread of the logits; float32 rounds to a hundredth of it, and a wrong part changes far more
PREFIX, BRANCH = 24, 8  # tokens: a cached prefix, and each of two branches after it
NAMED_NORMS = {
    "PRE_NORM": PRE_NORM,
    "POST_NORM": POST_NORM,
    "SANDWICH_NORM": SANDWICH_NORM,
    "PARALLEL": PARALLEL,
    "GLM4_NORM": GLM4_NORM,
}
_KNOWN_MLPS = ("mlp", "block_sparse_moe", "feed_forward", "fc1 activation_fn fc2")
_KNOWN_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
_KNOWN_INNERS = ("model.decoder", "model", "gpt_neox", "transformer")
_KNOWN_LAYERS = ("layers", "h")
_KNOWN_EMBEDDINGS = ("embed_tokens", "embed_in", "wte")
_KNOWN_ATTENTIONS = ("self_attn", "attention", "attn")
_KNOWN_POSITIONS = ("wpe", "embed_positions")


@dataclass(frozen=True)
class Trial:
    """How far a walk is from transformers: the largest difference of a logit, in standard deviations of the logits, and that
    of the hidden rows after two halves of a layer from those after the layer."""

    family: Family
    logits: float
    halves: float
    reaches_attention: bool = True  # layers hand our pass on to their attention
    windows: tuple[int, ...] = ()  # of its layers

    @property
    def agrees(self) -> bool:
        return self.logits < AGREEMENT and self.halves < AGREEMENT  # a NaN does not agree

    @property
    def worst(self) -> float:
        return max(self.logits, self.halves)


@dataclass(frozen=True)
class Verdict:
    """Whether a model runs here, and if not, why, or with which line of the table it would."""

    model_type: str
    supported: bool
    said: str
    trial: Trial | None = None
    unreached_window: int = 0  # longer than what was tried
    slow: bool = False  # transformers alone runs it

    @property
    def line(self) -> str | None:
        return None if self.supported or self.trial is None or not self.trial.agrees else line_of(self.trial.family)


def judge(folder: Path) -> Verdict:
    """Try the model in a folder, in float32 on the CPU."""
    config = read_config(folder)
    known = config.model_type in FAMILIES
    if not known and (found := obstacles(config)):
        return Verdict(config.model_type, False, "; ".join([*map(str, found), *([SLOW] if generates(config) else [])]))
    try:
        if known:
            hf = load_stock(folder, torch.device("cpu"), torch.float32)
            trial = try_family(hf, family_of(config))
        else:
            hf = read_weights(folder, config, torch.float32, "eager")
            trial = find_line(hf)
    except ModelUnsupported as error:
        return Verdict(config.model_type, False, str(error))
    return _verdict(config.model_type, known, trial)


def judge_slow(folder: Path) -> Verdict:
    """Try the model in a folder as `load(slow=True)` runs it, in float32 on the CPU."""
    model_type = read_config(folder).model_type
    try:
        with warnings.catch_warnings(action="ignore", category=ForewordWarning):  # the verdict says the same
            model = load_slow(folder, torch.device("cpu"), torch.float32)
    except (InputError, ModelUnsupported) as error:
        return Verdict(model_type, False, str(error))
    return Verdict(model_type, True, f"it runs slow, {model.slow}; drafts are chains", slow=True)


def _verdict(model_type: str, known: bool, trial: Trial) -> Verdict:
    far = f"the walk over its layers differs from transformers by {trial.worst:.1e}, in standard deviations of the values"
    if not trial.reaches_attention:
        return Verdict(
            model_type, False, "its layers keep keyword arguments from their attention, so ours gets no tree", trial
        )
    if not trial.agrees:
        return Verdict(model_type, False, f"{far}; the most that rounding explains is {AGREEMENT}", trial)
    said = far if known else f"{far}; this line in model/families.py would do: {line_of(trial.family)}"
    longest = max(trial.windows, default=0)
    return Verdict(model_type, known, said, trial, longest if longest > PREFIX + BRANCH else 0)


def find_line(hf: PreTrainedModel) -> Trial:
    """Return the first family that an unknown model agrees with, or the last one tried."""
    problem, trial = "", None
    for family in guesses(hf):
        try:
            trial = try_family(hf, family)
        except Exception as error:  # layers that nobody tried may fail in any way
            problem = f"{type(error).__name__}: {error}"
            continue
        if trial.agrees:
            return trial
    if trial is None:
        raise ModelUnsupported(f"its layers cannot be run one by one with our attention ({problem})")
    return trial


def try_family(hf: PreTrainedModel, family: Family) -> Trial:
    """Score a tree of two branches after a cached prefix, and compare each branch with a forward pass of its own. Then
    compare the halves of each layer with the layer."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(hf.config.vocab_size, (PREFIX + 2 * BRANCH,), generator=generator).to(hf.device)
    prefix, *branches = tokens.split([PREFIX, BRANCH, BRANCH])
    expected = torch.cat([_forward(hf, torch.cat([prefix, branch]))[PREFIX:] for branch in branches])
    model = Model(hf, family=family)
    try:
        found = _walk(model, prefix, torch.cat(branches))
        differ = float((found - expected).abs().max() / expected.std())
        return Trial(family, differ, _halves(model, prefix), _reaches_attention(model), tuple(model.layer_stack.windows))
    finally:
        model.release()


@torch.no_grad()
def _reaches_attention(model: Model) -> bool:
    """Whether the first layer hands our pass on. If it does not, its attention is that of transformers, over no cache."""
    handed: list[bool] = []
    layer: Any = model.layer_stack.layers[0]
    hook = model.family.attention(layer).register_forward_pre_hook(
        lambda _, __, given: handed.append("foreword_pass" in given), with_kwargs=True
    )
    try:
        model.read(torch.zeros(1, 1, dtype=torch.long, device=model.device), Needs(hidden=True))
    finally:
        hook.remove()
    return all(handed)


@torch.no_grad()
def _forward(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits: Tensor = hf(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
    return logits.float()


@torch.no_grad()
def _walk(model: Model, prefix: Tensor, branches: Tensor) -> Tensor:
    """Return the logits of two branches after a prefix. The root of the tree is the last token of the prefix."""
    model.allocate(1, PREFIX + 2 * BRANCH, 2 * BRANCH + 1)
    batch, before = Batch.of([0], PREFIX - 1), prefix[:-1].unsqueeze(0)
    model.score(Batch.of([0], 0), _draft(before, Tree.chain(PREFIX - 1, model.device)), Needs(), logits="none")
    model.cache.advance(batch, torch.tensor([PREFIX - 1], device=model.device))
    one = (0, *range(1, BRANCH))
    parents = (0, *one, 0, *(BRANCH + row for row in one[1:]))
    tokens = torch.cat([prefix[-1:], branches]).unsqueeze(0)
    logits = model.score(batch, _draft(tokens, Tree.of(parents, model.device)), Needs()).require_logits()
    return logits[0, 1:].float()


def _draft(tokens: Tensor, tree: Tree) -> Draft:
    return Draft(tokens, tree, torch.full_like(tokens[:, 0], tokens.shape[1]))


@torch.no_grad()
def _halves(model: Model, tokens: Tensor) -> float:
    """Return how far the two halves of a layer are from the layer, at most. A pass may leave out either of them."""
    worst, hidden, norms = 0.0, model.embed(tokens.unsqueeze(0)), model.family.norms
    family = replace(model.family, parts=model.family.parts._replace(positions=""))  # not in each layer again
    parallel = norms.before_mlp == norms.before_attention != "" or getattr(model.hf.config, "use_parallel_residual", False)
    for layer in model.layer_stack.layers:
        alone = Stack(model.hf, family, nn.ModuleList([layer]))
        whole = alone.walk_sequences(hidden)
        halfway = alone.walk_sequences(hidden, Skip.of(mlp=(0,)))
        second = alone.walk_sequences(hidden if parallel else halfway, Skip.of(attention=(0,)))
        both = halfway + second - hidden if parallel else second
        worst = max(worst, float((both - whole).abs().max() / whole.std()))
        hidden = whole
    return worst


def guesses(hf: PreTrainedModel) -> Iterator[Family]:
    """Yield the families that the parts of an unknown model suggest, or raise an error that names the parts it lacks."""
    parts, config = _parts_of(hf), cast(Any, hf.config)
    inner: Any = attrgetter(parts.inner)(hf)
    layer = getattr(inner, parts.layers)[0]
    attention: Any = getattr(layer, parts.attention)
    factors = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    for norms, windows in product(_norms_of(layer), _windows_of(config)):
        yield Family(
            config.model_type,
            norms=norms,
            parts=parts,
            mlp=_first(layer, _KNOWN_MLPS),
            final_norm=_first(inner, _KNOWN_FINAL_NORMS),
            windows=windows,
            has_experts=hasattr(config, "num_experts_per_tok"),
            has_multipliers=all(hasattr(config, name) for name in factors),
            scales_logits=hasattr(config, "logit_scale"),
            has_sinks=hasattr(attention, "sinks"),
            caps_scores=bool(getattr(attention, "attn_logit_softcapping", None)),
            caps_logits=bool(getattr(config, "final_logit_softcapping", None)),
            rotary_by_type=any(isinstance(one, dict) for one in (getattr(config, "rope_parameters", None) or {}).values()),
        )


def _parts_of(hf: PreTrainedModel) -> Parts:
    """Return the names of a model's parts, or raise an error that names those it lacks."""
    inner = _first(hf, _KNOWN_INNERS)
    held: Any = attrgetter(inner)(hf) if inner else None
    layers, embedding = _first(held, _KNOWN_LAYERS), _first(held, _KNOWN_EMBEDDINGS)
    every = getattr(held, layers, None) or [None]
    attention, positions = _first(every[0], _KNOWN_ATTENTIONS), _first(held, _KNOWN_POSITIONS)
    found = {
        "lm_head": hasattr(hf, "lm_head"),
        " or ".join(_KNOWN_INNERS): inner,
        " or ".join(_KNOWN_EMBEDDINGS): embedding,
        " or ".join((Parts().rotary, *_KNOWN_POSITIONS)): hasattr(held, Parts().rotary) or positions,
        " or ".join(_KNOWN_FINAL_NORMS): _first(held, _KNOWN_FINAL_NORMS),
        f"{' or '.join(_KNOWN_ATTENTIONS)} in its layers": attention and all(hasattr(layer, attention) for layer in every),
        f"{' or '.join(_KNOWN_MLPS)} in its layers": _first(every[0], _KNOWN_MLPS),
    }
    if lacking := [name for name, there in found.items() if not there]:
        raise ModelUnsupported(
            f"{type(hf).__name__} has no {', no '.join(lacking)}; a line of the table cannot name its parts"
        )
    return Parts(inner, layers, embedding, attention, Parts().rotary if not positions else "", positions)


def _first(module: Any, names: tuple[str, ...]) -> str:
    """Return the first name whose parts a module has all. A name may be a path, or that of several parts."""
    return next((name for name in names if all(_has(module, part) for part in name.split())), "")


def _has(module: Any, path: str) -> bool:
    try:
        attrgetter(path)(module)
    except AttributeError:
        return False
    return True


def _windows_of(config: Any) -> list[Windows]:
    """Return where a model's windows may be, the likeliest first."""
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        return ["by type"]
    return ["all layers", "none"] if getattr(config, "sliding_window", None) else ["none"]


def _norms_of(layer: Any) -> list[Norms]:
    """Return the ways in which a layer may use its norms: those of known families, then before both halves."""
    own = [name for name, child in layer.named_children() if "Norm" in type(child).__name__]
    known = [norms for norms in NAMED_NORMS.values() if {*norms} - {""} == {*own}]
    before_both = [Norms(before_attention=own[0], before_mlp=own[-1])] if 1 <= len(own) <= 2 else []
    found = [*known, *(norms for norms in before_both if norms not in known)]
    if not found:
        raise ModelUnsupported(
            f"its layers have the norms {', '.join(own) or 'of no name'}, which no known family has together"
        )
    return found


def line_of(family: Family) -> str:
    """Return the line of the table for a family."""
    said = []
    for one in fields(family):
        value = getattr(family, one.name)
        if value != one.default:
            names = {norms: name for name, norms in NAMED_NORMS.items()}
            said.append(f"{one.name}={names.get(value, repr(value)) if one.name == 'norms' else repr(value)}")
    return f"Family({', '.join(said).removeprefix('name=')})"
