"""Drafters with weights: what is trained is what is drafted, every weight learns, and the weights outlive an engine."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, get_args

import pytest
import torch

from doubles import (
    CONTEXT,
    LEARNERS,
    SAMPLINGS,
    TRAINED,
    VOCABULARY,
    chain,
    engine,
    prompts,
    requests,
    target,
    taught,
    texts_of,
    truth,
    written,
)
from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.state import Batch
from foreword.drafting.trees import BestFirst, FixedRows, TreeKind
from foreword.engine.request import Request
from foreword.errors import DrafterError, InputError
from foreword.methods import METHODS, make, trained_as, untrained
from foreword.methods.hidden_transfer import Kind as OwnKind
from foreword.model.cost import CostCurve
from foreword.model.model import Model
from foreword.ops.noise import gumbel

# Every form a trained method has: its name and the options that matter to the way a guess is made.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "medusa, two layers": ("medusa", {"layers": 2}),
    "hydra": ("hydra", {}),
    "hydra, two layers": ("hydra", {"layers": 2}),
    "hydra, prefix": ("hydra", {"prefix": True}),
    "clover": ("clover", {}),
    "clover, attention of the block": ("clover", {"block": "attention"}),
    "clover, MLP of the block": ("clover", {"block": "mlp"}),
    "clover, no block": ("clover", {"block": "none"}),
    "clover, no attention decoder": ("clover", {"attention": False}),
    "clover, not regressive": ("clover", {"regressive": False}),
    "clover2": ("clover2", {}),
    "clover2, taps": ("clover2", {"taps": (1, 3)}),
    "clover2, fused by attention": ("clover2", {"fuse": "attention"}),
    "hidden_transfer": ("hidden_transfer", {"carry": "all"}),
    "hidden_transfer, likely nodes": ("hidden_transfer", {"rows": 12}),
    "hidden_transfer, chained": ("hidden_transfer", {"source": "chain", "layers": (0, 2, 2), "carry": "all"}),
    "hidden_transfer, best": ("hidden_transfer", {"tree": "best", "rows": 12}),
    "hidden_transfer, one layer": ("hidden_transfer", {"layers": (1, 1, 1), "carry": "all"}),
    "hidden_transfer, low rank": ("hidden_transfer", {"squeeze": 2, "bias": False, "carry": "all"}),
    "hidden_transfer, rows as they are": ("hidden_transfer", {"norm": False, "carry": "all"}),
    "draft_model": ("draft_model", {}),
    "draft_model, one layer": ("draft_model", {"layers": 1}),
}
SIDE_BY_SIDE = ("medusa", "hidden_transfer", "firp")
"""Methods whose guesses do not know one another: all of them come at once, and every node of a level shares them."""
COUNT = {"hidden_transfer": "steps", "firp": "steps", "draft_model": "depth"}
"""What a method calls the number of tokens that it guesses ahead."""

every_form = pytest.mark.parametrize("form", FORMS)
HEADS = 3
FORK = [[first, *[0] * depth] for depth in range(HEADS) for first in (0, 1)]


def made(form: str, model: Model, **options: Any) -> Any:
    name, own = FORMS.get(form, (form, {}))  # or a method that takes the drafters of another
    return taught(name, model, **{COUNT.get(name, "heads"): HEADS} | own | options)


def by_level(form: str, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the target's head was handed for each level of a draft: [b, w, H]."""
    alone = form.partition(",")[0] in SIDE_BY_SIDE
    return [rows[0][:, head : head + 1] for head in range(HEADS)] if alone else rows


def figures_of(form: str) -> list[str]:
    """A model that writes on is one head, whose next guess is made as the first."""
    heads = 1 if form.startswith("draft_model") else HEADS
    return [f"{name}/{head}" for head in range(1, heads + 1) for name in ("top1", "top5", "rows")]


def scores_of(model: Model, texts: list[list[int]], needs: Needs) -> Scores:
    """A full causal pass, as training makes it."""
    model.allocate(len(texts), CONTEXT, len(texts[0]))
    with torch.no_grad():
        return model.score(Batch.of(range(len(texts)), 0), chain(texts), replace(needs, grafts=()))  # type: ignore[arg-type]


def test_every_trained_method_is_here() -> None:
    trained = {name for name, method in METHODS.items() if method.trained}
    assert set(TRAINED) == trained and set(LEARNERS) == {name for name, _ in FORMS.values()}


class Heard:
    """What was handed to the target's head, call by call."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[torch.Tensor] = []
        for name in ("head", "draft_head"):
            monkeypatch.setattr(model, name, partial(self._hear, getattr(model, name)))

    def _hear(
        self, head: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, norm: torch.nn.RMSNorm | None = None
    ) -> torch.Tensor:
        rows = rows if norm is None else norm(rows)
        self.rows.append(rows.detach().clone())
        return head(rows)

    def of(self, call: Callable[[], object]) -> list[torch.Tensor]:
        self.rows.clear()
        call()
        return list(self.rows)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@every_form
def test_what_is_trained_is_what_is_drafted(form: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two branches of a draft, each laid before the loss as a text: every head makes of it what it made in the round."""
    model = target(family)
    forked = {} if "hidden_transfer" in form else {"tree": "static", "paths": FORK}
    drafter = made(form, model, labels="hard", **forked, **{"regression": 0.0} if "clover2" in form else {})
    steps, heard = engine(drafter, model, slots=2), Heard(model, monkeypatch)
    for prompt in prompts(3)[1:]:
        steps.add(Request(prompt, SAMPLINGS["greedy"], max_new_tokens=20, ignore_eos=True))
    for _ in range(9):  # prompts of several chunks, then a few rounds
        steps.step()
    state = steps.state.at(Batch.of([0, 1], max(run.length for run in steps.slots.running.values())))
    drafts = []
    with torch.inference_mode():
        levels = by_level(form, heard.of(lambda: drafts.append(drafter.propose(state))))
    texts, guessed = texts_of(state), drafts[0].tokens
    for row, branch in product(range(2), range(2)):
        whole = [*texts[row], *guessed[row, 1 + branch :: 2].tolist()]
        scores, mask = scores_of(model, [whole], drafter.needs), torch.zeros(1, len(whole), dtype=torch.bool)
        mask[0, len(texts[row]) :] = True
        trained = heard.of(lambda w=whole, m=mask, s=scores: drafter.loss(torch.tensor([w]), m, s, model))  # type: ignore[misc]
        if form.startswith("draft_model"):  # all rows of the text at once
            trained = list(trained[0].split(1))
        assert len(levels) == len(trained) == HEADS
        known = int(drafter.have[row]) if "hidden_transfer" in form else HEADS  # an unlikely node carried fewer
        first = len(texts[row]) - 2 if "hidden_transfer" in form else 0  # of the rows that are learned from, or of all
        for one, other in zip(levels[:known], trained, strict=False):
            torch.testing.assert_close(one[row, min(branch, one.shape[1] - 1)], other[first])


@pytest.mark.parametrize("form", ["medusa", "hydra", "clover", "clover2", "draft_model", "firp"])
def test_guesses_are_ranked_under_the_noise(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the place where the token will stand: the noise that the target draws with."""
    model, heat = target(), 0.8
    drafter = made(form, model, tree="static", paths=FORK)
    steps = engine(drafter, model, slots=2)
    for request in requests(3, SAMPLINGS["T=0.8"], ignore_eos=True)[1:]:
        steps.add(request)
    for _ in range(7):
        steps.step()
    state = steps.state.at(Batch.of([0, 1], max(run.length for run in steps.slots.running.values())))
    heard, drafts = Heard(model, monkeypatch), []
    with torch.no_grad():
        levels = by_level(form, heard.of(lambda: drafts.append(drafter.propose(state))))
    for level, at in enumerate(levels, start=1):
        place = (state.length + level).unsqueeze(1).expand(-1, at.shape[1])
        scores = model.head(at.clone()).detach() / heat + gumbel(state.sampling.key, place, torch.arange(VOCABULARY))
        wanted = scores.topk(2).indices[:, 0] if level == 1 else scores.argmax(-1).expand(-1, 2)
        assert drafts[0].tokens[:, 2 * level - 1 : 2 * level + 1].tolist() == wanted.tolist()


@every_form
def test_a_form_writes_the_truth(form: str) -> None:
    model, asked = target("qwen3"), requests(4, SAMPLINGS["T=0.8"])
    assert written(engine(made(form, model), model, 2), asked) == [truth(model.hf, request) for request in asked]


def lesson(model: Model, needs: Needs) -> tuple[torch.Tensor, torch.Tensor, Scores]:
    texts = [[*request.prompt[:1], *truth(model.hf, request)] for request in requests(4, max_new_tokens=20, ignore_eos=True)]
    mask = torch.ones(4, 21, dtype=torch.bool)
    mask[:, 0] = False
    return torch.tensor(texts), mask, scores_of(model, texts, needs)


@every_form
def test_every_weight_learns(form: str) -> None:
    """A few steps on a few texts: the loss falls, the guesses get better, and no weight stays as it was."""
    model = target()
    drafter = made(form, model)
    tokens, mask, scores = lesson(model, drafter.needs)
    weights = dict(drafter.module.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    steps = torch.optim.Adam(weights.values(), lr=0.01)
    seen: list[tuple[float, dict[str, torch.Tensor]]] = []
    for _ in range(25):
        loss, figures = drafter.loss(tokens, mask, scores, model)
        steps.zero_grad()
        loss.backward()
        steps.step()
        seen.append((loss.item(), figures))
    assert seen[-1][0] < 0.75 * seen[0][0]
    assert list(seen[0][1]) == figures_of(form)
    assert seen[-1][1]["top1/1"] > seen[0][1]["top1/1"] and all(value.ndim == 0 for value in seen[0][1].values())
    idle = {"attention": "mlp", "mlp": "self_attn"}.get(getattr(drafter, "block", ""), "-")  # the half that is left out
    norm = {"attention": "post_attention", "mlp": "input_layernorm"}.get(getattr(drafter, "block", ""), "-")
    same = {name for name, weight in weights.items() if torch.equal(weight, before[name])}
    assert all(idle in name or norm in name for name in same)


@every_form
def test_where_nothing_was_written_there_is_nothing_to_learn(form: str) -> None:
    """A loss of 0 that can be stepped on, not the mean of nothing."""
    model = target()
    drafter = made(form, model)
    tokens, mask, scores = lesson(model, drafter.needs)
    loss, figures = drafter.loss(tokens, torch.zeros_like(mask), scores, model)
    loss.backward()
    assert loss == 0 and all(value == 0 for value in figures.values())
    assert all(weight.grad is None or (weight.grad == 0).all() for weight in drafter.module.parameters())


@every_form
def test_padding_teaches_nothing(form: str) -> None:
    model = target()
    drafter = made(form, model)
    tokens, mask, scores = lesson(model, drafter.needs)
    alone, _ = drafter.loss(tokens, mask, scores, model)
    padded = torch.nn.functional.pad(tokens, (0, 4), value=9)
    wide = scores_of(model, padded.tolist(), drafter.needs)
    loss, _ = drafter.loss(padded, torch.nn.functional.pad(mask, (0, 4)), wide, model)
    torch.testing.assert_close(loss, alone)


@every_form
def test_the_config_makes_the_same_module_again(form: str) -> None:
    model = target()
    drafter = made(form, model)
    again: Any = untrained(FORMS[form][0], **json.loads(json.dumps(drafter.config)))
    again.prepare(model, 2)
    again.module.load_state_dict(drafter.module.state_dict())
    learned_from = [replace(one.needs, grafts=()) for one in (again, drafter)]  # which rows carry grafts is no part of it
    assert again.config == drafter.config and learned_from[0] == learned_from[1]


@pytest.mark.parametrize(
    "form", ["medusa", "hydra, prefix", "clover", "clover2, taps", "hidden_transfer", "firp", "draft_model"]
)
def test_another_engine_keeps_what_was_learned(form: str) -> None:
    """Other slots, other context: the same weights, at the same place."""
    model, asked = target(), requests(4, SAMPLINGS["greedy"])
    drafter = made(form, model)
    places = {name: weight.data_ptr() for name, weight in drafter.module.named_parameters()}
    for slots, context in ((1, 64), (3, 50)):
        found = written(engine(drafter, model, slots, context), asked)
        assert found == [truth(model.hf, request, context) for request in asked]
    assert places == {name: weight.data_ptr() for name, weight in drafter.module.named_parameters()}


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("name", TRAINED)
def test_few_rows(name: str, rows: int) -> None:
    model, asked = target(), requests(3)
    drafter = taught(name, model, rows=rows)
    assert written(engine(drafter, model), asked) == [truth(model.hf, request) for request in asked]
    carried = drafter.needs.grafted_rows
    assert drafter.shape.nodes + carried == rows if carried else drafter.shape.nodes in (1, rows)


TREES = [(name, tree) for name in LEARNERS for tree in get_args(TreeKind)]
TREES = [(name, tree) for name, tree in TREES if name != "hidden_transfer" or tree in get_args(OwnKind)]


@pytest.mark.parametrize(("name", "tree"), TREES)
def test_every_tree(name: str, tree: str) -> None:
    model, asked = target(), requests(3, SAMPLINGS["T=0.8"])
    drafter = taught(name, model, tree=tree)
    assert drafter.wants_cost
    assert written(engine(drafter, model), asked) == [truth(model.hf, request) for request in asked]


@pytest.mark.parametrize("name", ["medusa", "firp", "hidden_transfer", "gsd", "draft_model"])
def test_where_no_row_pays_no_head_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drafted, so nothing is worked out; what reads the text along still does."""
    model, asked = target(), requests(4, max_new_tokens=8)
    model.curve = CostCurve((1, 64), (1.0, 64.0))
    drafter = taught(name, model)
    steps = engine(drafter, model)
    if isinstance(getattr(drafter, "growth", None), BestFirst):  # settled beforehand, as on CUDA
        drafter.growth = replace(drafter.growth, fixed=FixedRows(model, drafter.shape))
    propose, heads = drafter.propose, []

    def silent(state: Any) -> Any:
        with monkeypatch.context() as patched:
            for head in ("head", "draft_head"):
                patched.setattr(model, head, heads.append)
            return propose(state)

    monkeypatch.setattr(drafter, "propose", silent)
    assert written(steps, asked) == [truth(model.hf, request) for request in asked]
    assert not heads


@pytest.mark.parametrize("name", TRAINED)
def test_weights_are_asked_for(name: str) -> None:
    with pytest.raises(DrafterError, match=f"{name} has weights of its own.*foreword train {trained_as(name)}"):
        make(name)


BAD: dict[str, Callable[[], object]] = {
    "needs at least one head": lambda: untrained("clover", heads=0),
    "heads=0 and layers=1": lambda: untrained("medusa", heads=0),
    "heads=4 and layers=0": lambda: untrained("hydra", layers=0),
    "block is 'half'; choose from full, attention, mlp, none": lambda: untrained("clover", block="half"),
    "labels is 'firm'": lambda: untrained("medusa", labels="firm"),
    "tree is 'budget'; choose from static, best": lambda: untrained("hidden_transfer", tree="budget"),
    "carry is 'some'; choose from likely, all": lambda: untrained("hidden_transfer", carry="some"),
    "rates is .*from 0 to 1": lambda: untrained("hidden_transfer", rates=[[1.2]]),
    "firp: layers is .3, 1.; 2 steps need one each": lambda: untrained("firp", steps=2, layers=[3, 1]),
    "layers is 0; a model has at least 1": lambda: untrained("draft_model", layers=0),
    "gsd: depth, width and branch are 1 at least, got 3, 0 and 8": lambda: untrained("gsd", depth=3, width=0),
    "gsd: repeat is -2; it counts tokens from 0 on": lambda: untrained("gsd", repeat=-2),
    "gsd: siblings is 0.01 and sure is 1.0": lambda: untrained("gsd", sure=1.0),
    "gsd: layers is 0": lambda: untrained("gsd", layers=0),
    "depth is 0; at least 1 token is guessed": lambda: untrained("draft_model", depth=0),
    "stop is 1.0; it is how likely": lambda: untrained("draft_model", tree="chain", stop=1.0),
    "tree is 'tall'": lambda: untrained("clover2", tree="tall"),
    "taps is .2.5, 3.; each is the number of a layer": lambda: untrained("clover2", taps=(2.5, 3)),
    "an option is of the wrong type": lambda: untrained("clover2", taps=3),
}


@pytest.mark.parametrize("match", BAD)
def test_options_that_cannot_be(match: str) -> None:
    with pytest.raises(InputError, match=match):
        BAD[match]()


def test_a_tap_outside_the_target() -> None:
    drafter = untrained("clover2", taps=(2, 9))
    with pytest.raises(DrafterError, match="tap 9 lies outside tiny-llama, which has layers 0 to 4"):
        drafter.prepare(target(), 1)


def test_more_layers_than_the_target_has() -> None:
    with pytest.raises(DrafterError, match="draft_model: layers is 5, but tiny-llama has 4; ask for no more"):
        untrained("draft_model", layers=5).prepare(target(), 1)
