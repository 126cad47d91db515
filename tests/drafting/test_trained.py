"""Drafters with weights: training and drafting compute the same, every weight learns, and weights outlive an engine."""

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
    IN_PROCESS,
    SAMPLINGS,
    TRAINABLE,
    TRAINED,
    VOCABULARY,
    chain,
    engine,
    prompts,
    requests,
    sequences_of,
    target,
    truth,
    with_random_weights,
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

# Every form of a trained method: its name, and the options that change how it computes draft tokens.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "medusa, two layers": ("medusa", {"layers": 2}),
    "hydra": ("hydra", {}),
    "hydra, two layers": ("hydra", {"layers": 2}),
    "hydra, prefix": ("hydra", {"prefix": True}),
    "chimera": ("chimera", {}),
    "chimera, taps": ("chimera", {"taps": (1, 3)}),
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
    "hidden_transfer, no norm": ("hidden_transfer", {"norm": False, "carry": "all"}),
    "masked": ("masked", {"layers": 2, "edges": 0}),
    "masked, no taps": ("masked", {"layers": 1, "edges": 0, "taps": ()}),
    "draft_model": ("draft_model", {}),
    "draft_model, one layer": ("draft_model", {"layers": 1}),
    "kangaroo": ("kangaroo", {"exit": 1}),
    "kangaroo, a layer": ("kangaroo", {"adapter": "layer"}),
}
INDEPENDENT = ("medusa", "hidden_transfer", "firp", "masked")
"""Methods with independent heads: all candidates come at once, and every node of a level shares them."""
ANCHORED = ("hidden_transfer", "chimera", "masked")
"""Methods whose loss hands all rows of these short sequences to the target's head, not only those with a label."""
COUNT = dict.fromkeys(("hidden_transfer", "firp"), "steps") | dict.fromkeys(("draft_model", "kangaroo"), "depth")
COUNT |= {"masked": "block"}
"""The option for the number of tokens that a method drafts ahead."""

every_form = pytest.mark.parametrize("form", FORMS)
HEADS = 3
FORK = [[first, *[0] * depth] for depth in range(HEADS) for first in (0, 1)]


def made(form: str, model: Model, **options: Any) -> Any:
    name, own = FORMS.get(form, (form, {}))  # or a method that uses the drafters of another
    return with_random_weights(name, model, **{COUNT.get(name, "heads"): HEADS} | own | options)


def by_level(form: str, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs of the target's head for each level of a draft: [b, w, H]."""
    independent = form.partition(",")[0] in INDEPENDENT
    return [rows[0][:, head : head + 1] for head in range(HEADS)] if independent else rows


def figures_of(form: str) -> list[str]:
    """Return the names of the figures. A draft model or an adapter has one head, which drafts every token alike."""
    heads = 1 if form.startswith(("draft_model", "kangaroo")) else HEADS
    return [f"{name}/{head}" for head in range(1, heads + 1) for name in ("top1", "top5", "rows")]


def scores_of(model: Model, sequences: list[list[int]], needs: Needs) -> Scores:
    """Run a full causal pass, as in training."""
    model.allocate(len(sequences), CONTEXT, len(sequences[0]))
    with torch.no_grad():
        return model.score(Batch.of(range(len(sequences)), 0), chain(sequences), replace(needs, grafts=()))  # type: ignore[arg-type]


def test_every_trained_method_is_here() -> None:
    trained = {name for name, method in METHODS.items() if method.trained}
    assert set(TRAINED) == trained and set(TRAINABLE) == {name for name, _ in FORMS.values()}


class HeadInputs:
    """Records the inputs of the target's head, call by call."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[torch.Tensor] = []
        for name in ("head", "draft_head"):
            monkeypatch.setattr(model, name, partial(self._record, getattr(model, name)))

    def _record(
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
@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("kangaroo")])  # test_kangaroo.py has its own
def test_training_and_drafting_compute_the_same(form: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two branches of a draft is given to the loss as a sequence: every head computes what it did in the round."""
    model = target(family)
    forked = {} if "hidden_transfer" in form else {"tree": "static", "paths": FORK}
    drafter = made(form, model, labels="hard", **forked, **{"regression": 0.0} if "clover2" in form else {})
    steps, head_inputs = engine(drafter, model, slots=2), HeadInputs(model, monkeypatch)
    for prompt in prompts(3)[1:]:
        steps.add(Request(prompt, SAMPLINGS["greedy"], max_new_tokens=20, ignore_eos=True))
    for _ in range(9):  # prompts of several chunks, then a few rounds
        steps.step()
    state = steps.state.at(Batch.of([0, 1], max(run.length for run in steps.slots.running.values())))
    drafts = []
    with torch.inference_mode():
        levels = by_level(form, head_inputs.of(lambda: drafts.append(drafter.propose(state))))
    sequences, drafted = sequences_of(state), drafts[0].tokens
    for row, branch in product(range(2), range(2)):
        whole = [*sequences[row], *drafted[row, 1 + branch :: 2].tolist()]
        scores, mask = scores_of(model, [whole], drafter.needs), torch.zeros(1, len(whole), dtype=torch.bool)
        mask[0, len(sequences[row]) :] = True
        trained = head_inputs.of(lambda w=whole, m=mask, s=scores: drafter.loss(torch.tensor([w]), m, s, model))  # type: ignore[misc]
        if form.startswith("draft_model"):  # all rows of the sequence at once
            trained = list(trained[0].split(1))
        assert len(levels) == len(trained) == HEADS
        known = int(drafter.have[row]) if "hidden_transfer" in form else HEADS  # an unlikely node carried fewer
        first = len(sequences[row]) - 2 if form.partition(",")[0] in ANCHORED else 0
        for one, other in zip(levels[:known], trained, strict=False):
            torch.testing.assert_close(one[row, min(branch, one.shape[1] - 1)], other[first])


@pytest.mark.parametrize("form", ["medusa", "hydra", "chimera", "clover", "clover2", "draft_model", "firp", "masked"])
def test_candidates_are_ranked_with_the_sampling_noise(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is that of the token's position, which the target samples with."""
    model, temperature = target(), 0.8
    drafter = made(form, model, tree="static", paths=FORK)
    steps = engine(drafter, model, slots=2)
    for request in requests(3, SAMPLINGS["T=0.8"], ignore_eos=True)[1:]:
        steps.add(request)
    for _ in range(7):
        steps.step()
    state = steps.state.at(Batch.of([0, 1], max(run.length for run in steps.slots.running.values())))
    head_inputs, drafts = HeadInputs(model, monkeypatch), []
    with torch.no_grad():
        levels = by_level(form, head_inputs.of(lambda: drafts.append(drafter.propose(state))))
    for level, at in enumerate(levels, start=1):
        position = (state.length + level).unsqueeze(1).expand(-1, at.shape[1])
        scores = model.head(at.clone()).detach() / temperature + gumbel(
            state.sampling.key, position, torch.arange(VOCABULARY)
        )
        correct = scores.topk(2).indices[:, 0] if level == 1 else scores.argmax(-1).expand(-1, 2)
        assert drafts[0].tokens[:, 2 * level - 1 : 2 * level + 1].tolist() == correct.tolist()


@every_form
def test_every_form_generates_the_truth(form: str) -> None:
    model, asked = target("qwen3"), requests(4, SAMPLINGS["T=0.8"])
    assert written(engine(made(form, model), model, 2), asked) == [truth(model.hf, request) for request in asked]


def lesson(model: Model, needs: Needs) -> tuple[torch.Tensor, torch.Tensor, Scores]:
    sequences = [
        [*request.prompt[:1], *truth(model.hf, request)] for request in requests(4, max_new_tokens=20, ignore_eos=True)
    ]
    mask = torch.ones(4, 21, dtype=torch.bool)
    mask[:, 0] = False
    return torch.tensor(sequences), mask, scores_of(model, sequences, needs)


@every_form
def test_every_weight_learns(form: str) -> None:
    """A few steps on a few sequences: the loss falls, accuracy rises, and every weight changes."""
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
    idle = {"attention": "mlp", "mlp": "self_attn"}.get(getattr(drafter, "block", ""), "-")  # the unused half of the block
    norm = {"attention": "post_attention", "mlp": "input_layernorm"}.get(getattr(drafter, "block", ""), "-")
    same = {name for name, weight in weights.items() if torch.equal(weight, before[name])}
    assert all(idle in name or norm in name for name in same)


@every_form
def test_without_generated_tokens_there_is_nothing_to_learn(form: str) -> None:
    """The loss is 0 with gradients, not the mean of no rows."""
    model = target()
    drafter = made(form, model)
    tokens, mask, scores = lesson(model, drafter.needs)
    loss, figures = drafter.loss(tokens, torch.zeros_like(mask), scores, model)
    loss.backward()
    assert loss == 0 and all(value == 0 for value in figures.values())
    assert all(weight.grad is None or (weight.grad == 0).all() for weight in drafter.module.parameters())


@every_form
def test_padding_does_not_change_the_loss(form: str) -> None:
    model = target()
    drafter = made(form, model)
    tokens, mask, scores = lesson(model, drafter.needs)
    alone, _ = drafter.loss(tokens, mask, scores, model)
    padded = torch.nn.functional.pad(tokens, (0, 4), value=9)
    wide = scores_of(model, padded.tolist(), drafter.needs)
    loss, _ = drafter.loss(padded, torch.nn.functional.pad(mask, (0, 4)), wide, model)
    torch.testing.assert_close(loss, alone)


@every_form
def test_the_config_rebuilds_the_same_module(form: str) -> None:
    model = target()
    drafter = made(form, model)
    again: Any = untrained(FORMS[form][0], **json.loads(json.dumps(drafter.config)))
    again.prepare(model, 2)
    again.module.load_state_dict(drafter.module.state_dict())
    learned_from = [
        replace(one.needs, grafts=()) for one in (again, drafter)
    ]  # the rows with grafts do not matter for training
    assert again.config == drafter.config and learned_from[0] == learned_from[1]


@pytest.mark.parametrize(
    "form",
    [
        *("medusa", "hydra, prefix", "chimera", "clover", "clover2, taps", "hidden_transfer", "firp", "draft_model"),
        *("masked", "kangaroo"),
    ],
)
def test_another_engine_keeps_the_weights(form: str) -> None:
    """With other slots and another context, the weights are the same, at the same addresses."""
    model, asked = target(), requests(4, SAMPLINGS["greedy"])
    drafter = made(form, model)
    addresses = {name: weight.data_ptr() for name, weight in drafter.module.named_parameters()}
    for slots, context in ((1, 64), (3, 50)):
        found = written(engine(drafter, model, slots, context), asked)
        assert found == [truth(model.hf, request, context) for request in asked]
    assert addresses == {name: weight.data_ptr() for name, weight in drafter.module.named_parameters()}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", TRAINED)
def test_few_rows(name: str, rows: int) -> None:
    model, asked = target(), requests(3)
    drafter = with_random_weights(name, model, rows=rows, **IN_PROCESS.get(name, {}))
    assert written(engine(drafter, model), asked) == [truth(model.hf, request) for request in asked]
    carried = drafter.needs.grafted_rows
    assert drafter.shape.nodes + carried == rows if carried else drafter.shape.nodes in (1, rows)


TREES = [(name, tree) for name in TRAINABLE if name != "kangaroo" for tree in get_args(TreeKind)]  # it has one kind
TREES = [(name, tree) for name, tree in TREES if name != "hidden_transfer" or tree in get_args(OwnKind)]


@pytest.mark.parametrize(("name", "tree"), TREES)
def test_every_tree(name: str, tree: str) -> None:
    model, asked = target(), requests(3, SAMPLINGS["T=0.8"])
    drafter = with_random_weights(name, model, tree=tree)
    assert drafter.wants_cost
    assert written(engine(drafter, model), asked) == [truth(model.hf, request) for request in asked]


@pytest.mark.parametrize("name", ["medusa", "firp", "hidden_transfer", "masked", "gsd", "draft_model", "kangaroo"])
def test_if_no_row_pays_off_no_head_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drafted, so no candidates are computed; a drafter's own cache still reads the sequence."""
    model, asked = target(), requests(4, max_new_tokens=8)
    model.curve = CostCurve((1, 64), (1.0, 64.0))
    drafter = with_random_weights(name, model)
    steps = engine(drafter, model)
    if isinstance(getattr(drafter, "growth", None), BestFirst):  # a fixed number of rows, as on CUDA
        drafter.growth = replace(drafter.growth, fixed=FixedRows(model, drafter.shape))
    propose, heads = drafter.propose, []

    def without_heads(state: Any) -> Any:
        with monkeypatch.context() as patched:
            for head in ("head", "draft_head"):
                patched.setattr(model, head, heads.append)
            return propose(state)

    monkeypatch.setattr(drafter, "propose", without_heads)
    assert written(steps, asked) == [truth(model.hf, request) for request in asked]
    assert not heads


@pytest.mark.parametrize("name", TRAINED)
def test_missing_weights_are_refused(name: str) -> None:
    with pytest.raises(DrafterError, match=f"{name} has weights of its own.*foreword train {trained_as(name)}"):
        make(name)


INVALID: dict[str, Callable[[], object]] = {
    "needs at least one head": lambda: untrained("clover", heads=0),
    "heads=0 and layers=1": lambda: untrained("medusa", heads=0),
    "heads=4 and layers=0": lambda: untrained("hydra", layers=0),
    "heads=5 and anchors=0": lambda: untrained("chimera", anchors=0),
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
    "depth is 0; it must be at least 1": lambda: untrained("draft_model", depth=0),
    "stop is 1.0; it is how likely": lambda: untrained("draft_model", tree="chain", stop=1.0),
    "kangaroo: exit is 0; it is the number of layers": lambda: untrained("kangaroo", exit=0),
    "kangaroo: exit is True": lambda: untrained("kangaroo", exit=True),
    "adapter is 'mlp'; choose from attention, layer": lambda: untrained("kangaroo", adapter="mlp"),
    "kangaroo: depth is 0": lambda: untrained("kangaroo", depth=0),
    "kangaroo: width is 0": lambda: untrained("kangaroo", width=0),
    "kangaroo: stop is 1": lambda: untrained("kangaroo", stop=1),
    "tree is 'tall'": lambda: untrained("clover2", tree="tall"),
    "taps is .2.5, 3.; each is the number of a layer": lambda: untrained("clover2", taps=(2.5, 3)),
    "an option is of the wrong type": lambda: untrained("clover2", taps=3),
    "block is 1; it must be from 2 to 32": lambda: untrained("masked", block=1),
    "layers=3, steps=0, anchors=64 and edges=64": lambda: untrained("masked", steps=0),
    "masked: taps is ..a',.": lambda: untrained("masked", taps=("a",)),
    "order is 'hard'; choose from mask, disco": lambda: untrained("masked", order="hard"),
    "order is 'disco' and steps is 1": lambda: untrained("masked", order="disco"),
    "given is 1.5; it is a share": lambda: untrained("masked", given=1.5),
}


@pytest.mark.parametrize("match", INVALID)
def test_invalid_options(match: str) -> None:
    with pytest.raises(InputError, match=match):
        INVALID[match]()


@pytest.mark.parametrize("name", ["clover2", "masked"])
def test_a_tap_outside_the_target(name: str) -> None:
    with pytest.raises(DrafterError, match=f"{name}: tap 9 lies outside tiny-llama, which has layers 0 to 4"):
        untrained(name, taps=(2, 9)).prepare(target(), 1)


@pytest.mark.parametrize("name", ["draft_model", "masked"])
def test_more_layers_than_the_target_has(name: str) -> None:
    with pytest.raises(DrafterError, match=f"{name}: layers is 5, but tiny-llama has 4; ask for no more"):
        untrained(name, layers=5).prepare(target(), 1)
