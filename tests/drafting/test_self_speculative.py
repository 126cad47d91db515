"""self_speculative drafts what the shortened target writes after the whole target's rows, and ends by the paper's rule."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from doubles import SAMPLINGS, Recorder, drafts_of, engine, fresh, requests, state_of, target, tiny, truth
from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs, Skip
from foreword.core.sampling import Sampling
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafters.resolve import DrafterRequest
from foreword.drafters.saved import save_plan
from foreword.drafting.skipped_target import SkippedTarget, SkipPlan, chain_with_leaves
from foreword.errors import CapacityError, DrafterError, InputError
from foreword.methods import make, untrained
from foreword.model.cost import CostCurve
from foreword.model.model import Model

PLAN: dict[str, Any] = {"attention": (1, 3), "mlp": (2,)}
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)


def shortened(model: PreTrainedModel, attention: tuple[int, ...], mlp: tuple[int, ...]) -> PreTrainedModel:
    """Return a copy of a model in which these half-layers add nothing."""
    reduced = copy.deepcopy(model)
    with torch.no_grad():
        for layer in attention:
            reduced.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in mlp:
            reduced.model.layers[layer].mlp.down_proj.weight.zero_()
    return reduced


@torch.no_grad()
def slow_draft(
    whole: PreTrainedModel, reduced: PreTrainedModel, sequence: list[int], threshold: float, most: int
) -> list[int]:
    """Return the draft of the paper's rule, by transformers: the whole model reads all but the last token."""
    cache, token, drafted = DynamicCache(), sequence[-1], []
    if sequence[:-1]:
        whole(input_ids=torch.tensor([sequence[:-1]]), past_key_values=cache, use_cache=True)
    while len(drafted) < most:
        logits = reduced(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
        token = int(logits.argmax())
        drafted.append(token)
        if logits.softmax(-1)[token] < threshold:
            break
    return drafted


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_draft_is_what_the_shortened_model_writes_until_it_is_unsure(family: str) -> None:
    """The threshold follows the paper's rule, round by round, and goes on where another sequence left it."""
    model, reduced = target(family), shortened(tiny(family), **PLAN)
    recorder = Recorder(make("self_speculative", **PLAN, threshold=0.3, depth=4, goal=0.5))
    engine(recorder, model, slots=1).generate(requests(4, max_new_tokens=14, ignore_eos=True))
    threshold, rate = 0.3, 0.5
    for before, after in zip(recorder.proposed, recorder.observed, strict=True):
        ((tokens, parents),) = drafts_of(before)
        assert tokens[1:] == slow_draft(model.hf, reduced, before.sequences[0], threshold, 4)
        assert parents == [0, *range(len(tokens) - 1)]
        assert after.accepted is not None
        if drafted := int(after.draft.size) - 1:  # at the end of a sequence nothing fits
            rate = 0.5 * rate + 0.5 * (int(after.accepted.count) - 1) / drafted
            moved = threshold + 0.01 if rate < 0.5 else threshold if drafted == 4 else threshold - 0.01
            threshold = 0.9 * threshold + 0.1 * moved
    assert threshold != 0.3 and recorder.inner.threshold.values.item() == pytest.approx(threshold, abs=1e-5)


@every_sampling
def test_a_fixed_shape_drafts_the_same_as_a_loop_that_stops(sampling: Sampling) -> None:
    """As on a GPU, where every round drafts to the end and masks what comes after the unsure token."""
    model, asked, drafts, read = target(), requests(5, sampling, ignore_eos=True), [], []
    for rows in (None, 13):
        recorder = Recorder(make("self_speculative", rows, **PLAN, threshold=0.4))
        steps = engine(recorder, model, slots=3)
        runs = steps.generate(asked)
        assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
        drafts.append([drafts_of(seen) for seen in recorder.proposed])
        read.append(sum(seen.draft.nodes for seen in recorder.proposed))
    assert drafts[0] == drafts[1] and read[0] < read[1] / 2


@every_sampling
def test_a_plan_that_leaves_out_nothing_of_weight_is_always_right(sampling: Sampling) -> None:
    """A half-layer that adds nothing can be left out: all drafts are accepted in full."""
    hf = shortened(fresh("llama"), (2,), (1,))
    asked = requests(4, sampling, max_new_tokens=15, ignore_eos=True)
    runs = engine(make("self_speculative", 5, attention=(2,), mlp=(1,), threshold=0.0), Model(hf)).generate(asked)
    assert all(run.accepted == [5, 5, 5] for run in runs)
    assert [run.tokens for run in runs] == [truth(hf, request) for request in asked]


def test_nothing_is_read_for_sequences_without_drafts() -> None:
    model, asked = target(), [replace(one, speculate=False) for one in requests(3)]
    recorder = Recorder(make("self_speculative", **PLAN))
    runs = engine(recorder, model).generate(asked)
    assert {seen.draft.nodes for seen in recorder.proposed} == {1}
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]


@pytest.mark.parametrize(
    ("agreement", "curve", "levels"),
    [
        (1.0, CostCurve((1, 64), (1.0, 1.0)), 6),
        (0.9, CostCurve((1, 64), (1.0, 1.0)), 3),  # 1.25x, 1.33x, 1.34x, 1.33x with 1 to 4
        (0.3, CostCurve((1, 64), (1.0, 1.0)), 0),
        (1.0, CostCurve((1, 64), (1.0, 64.0)), 0),
    ],
)
def test_where_rounds_are_fixed_the_agreement_decides_how_far_they_draft(
    agreement: float, curve: CostCurve, levels: int
) -> None:
    model = target()
    model.use_costs(curve)
    shortened = SkippedTarget("self_speculative", SkipPlan(Skip.of((0, 1, 2, 3), (0,)), agreement))
    shortened.bind(model, 1, 6, 7)
    assert model.skip_cost(shortened.plan.skip) == pytest.approx(1 - (4 * 3072 + 6144) / 38_400)  # of the weights of a pass
    assert shortened.paying_levels(1, agreement, 6) == levels


def test_leaves_follow_the_first_node_of_the_level_before() -> None:
    assert chain_with_leaves(3, 3, torch.device("cpu")).parent.tolist() == [[0, 0, 0, 0, 1, 1, 1, 4, 4, 4]]
    assert chain_with_leaves(3, 1, torch.device("cpu")).is_chain


# Rows that are read while drafting


class Eager(Drafter):
    """Reads more rows of a chain while it drafts than it declares."""

    shape = Shape(2, 1)

    def __init__(self, reads: int, declares: int = 0, verifies: int = 2) -> None:
        self.reads, self.verifies, self.needs = reads, verifies, Needs(scratch=declares)

    def bind(self, target: Target, slots: int) -> None:
        self.target = target

    def propose(self, state: State) -> Draft:
        chain = Draft(state.root.unsqueeze(1).repeat(1, self.reads), Tree.chain(self.reads), state.root)
        for row in range(self.reads):
            self.target.score(state.batch, chain, Needs(), rows=range(row, row + 1))
        size = torch.full_like(state.root, self.verifies)
        return Draft(chain.tokens[:, :1].repeat(1, self.verifies), Tree.chain(self.verifies), size)


def test_rows_read_while_drafting_are_declared() -> None:
    asked = requests(2, max_new_tokens=60)
    assert engine(Eager(6, declares=6)).generate(asked)[0].tokens == truth(target().hf, asked[0])
    with pytest.raises(CapacityError, match="a pass over 3 draft rows needs as many scratch rows.* with 2; let the drafter"):
        engine(Eager(6)).generate(asked)


def test_a_chain_is_no_longer_than_the_shape_says() -> None:
    with pytest.raises(CapacityError, match="a pass over 3 draft rows"):
        engine(Eager(1, verifies=3)).generate(requests(1))


# Plans as folders, and gsd


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    save_plan("self_speculative", {**PLAN, "agreement": 0.5}, folder, target())
    return folder


def drafts_by(drafter: Drafter, model: Model, sampling: Sampling) -> list[Any]:
    recorder = Recorder(drafter)
    asked = requests(4, sampling, max_new_tokens=10)
    assert [run.tokens for run in engine(recorder, model).generate(asked)] == [truth(model.hf, one) for one in asked]
    return [drafts_of(seen) for seen in recorder.proposed]


@every_sampling
def test_a_plan_in_a_folder_drafts_as_the_same_options_do(plan: Path, sampling: Sampling) -> None:
    model = target()
    name, drafter = DrafterRequest.of(drafter=plan, rows=6).resolve(model)
    assert name == "self_speculative" and drafter.skip_plan.agreement == 0.5  # type: ignore[attr-defined]
    drafts = drafts_by(drafter, model, sampling)
    assert drafts == drafts_by(make("self_speculative", 6, **PLAN), model, sampling)
    assert any(len(tokens) > 2 for one in drafts for tokens, _ in one)


@every_sampling
@pytest.mark.parametrize("options", [{}, {"repeat": -1, "width": 3}, {"depth": 6, "width": 12}], ids=str)
def test_gsd_drafts_by_a_plan(plan: Path, sampling: Sampling, options: dict[str, Any]) -> None:
    model = target()
    name, drafter = DrafterRequest.of("gsd", plan, 16, siblings=0.0, sure=0.0, **options).resolve(model)
    drafts = drafts_by(drafter, model, sampling)
    assert name == "gsd" and max(len(tokens) for one in drafts for tokens, _ in one) == 16
    assert drafter.needs.prompt == "none" and drafter.scratch >= 1 + options.get("depth", 5) * options.get("width", 8)


def test_gsd_and_its_small_model_agree_on_a_plan_of_the_whole_target() -> None:
    """A plan whose half-layers add nothing: the graph is that of a draft model which is the whole target."""
    hf = shortened(fresh("llama"), (2,), ())
    rule: dict[str, Any] = dict(rows=16, depth=3, siblings=0.0, sure=0.0)
    plan = SkipPlan(Skip.of((2,)))
    asked, drafts = requests(4, max_new_tokens=10, ignore_eos=True), []
    for drafter in (untrained("gsd", layers=4, **rule), untrained("gsd", plan=plan, **rule)):
        recorder = Recorder(drafter)
        engine(recorder, Model(hf)).generate(asked)
        drafts.append([drafts_of(seen) for seen in recorder.proposed])
    assert drafts[0] == drafts[1]


REFUSED = {
    "both list layers, counted from 0": lambda: make("self_speculative", attention=(-1,)),
    "depth is 0; it must be at least 1": lambda: make("self_speculative", depth=0),
    "threshold is 2.0 and goal is 0.9; both are shares": lambda: make("self_speculative", threshold=2.0),
    "agreement is 1.5; it is a share": lambda: make("self_speculative", agreement=1.5),
    "method 'gsd:plan=x' says plan, which is no option": lambda: DrafterRequest.of("gsd:plan=x"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_options_are_refused(message: str) -> None:
    with pytest.raises(InputError, match=message):
        REFUSED[message]()


def test_a_plan_is_needed_and_has_to_fit(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.drafters.shipped.WEIGHTS", tmp_path)
    with pytest.raises(
        DrafterError, match="self_speculative has a plan of its own, and no drafter.*`foreword search self_spec"
    ):
        DrafterRequest.of("self_speculative")
    assert DrafterRequest.of("self_speculative:attention=1,2").folder is None
    with pytest.raises(DrafterError, match="no half-layer is left out; name the folder"):
        make("self_speculative").prepare(target(), 1)
    for made in (make("self_speculative", mlp=(9,)), untrained("gsd", plan=SkipPlan(Skip.of(mlp=(9,))))):
        with pytest.raises(DrafterError, match="a half of layer 9, but tiny-llama has 4 layers"):
            made.prepare(target(), 1)
    with pytest.raises(DrafterError, match="trained for tiny-llama.*but the target is tiny-qwen3"):
        DrafterRequest.of(drafter=plan).resolve(target("qwen3"))
    with pytest.raises(DrafterError, match="holds a drafter of self_speculative, not of draft_model"):
        DrafterRequest.of("draft_model", plan)
    with pytest.raises(DrafterError, match="swift has no weights of its own, so it takes no drafter"):
        DrafterRequest.of("swift", plan)
    with pytest.raises(InputError, match="was trained with attention=.1, 3.; leave attention out"):
        DrafterRequest.of(drafter=plan, attention=(1,))
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((plan / "config.json").read_text()) | {"config": {"mlp": "x"}})
    )
    with pytest.raises(DrafterError, match="config.json cannot be used"):
        DrafterRequest.of(drafter=tmp_path)


def test_a_frozen_or_undrafted_sequence_changes_no_threshold() -> None:
    drafter: Any = make("self_speculative", **PLAN)
    drafter.prepare(target(), 3)
    state = state_of([[3, 4], [5, 6], [7, 8]])
    drafter.threshold.learn(state, torch.tensor([4, 0, 4]), torch.tensor([0, 1, 1]), 4)
    assert drafter.threshold.values.tolist() == pytest.approx([0.6, 0.6, 0.601])
