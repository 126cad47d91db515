"""Method specs: a name, optionally a folder, optionally options."""

import pytest

from foreword.drafters.resolve import DrafterRequest
from foreword.drafters.spec import parse_spec, split_specs
from foreword.errors import InputError


@pytest.mark.parametrize(
    ("text", "name", "folder", "options"),
    [
        ("gsd", "gsd", None, {}),
        ("clover=runs/clover", "clover", "runs/clover", {}),
        ("gsd:repeat=0:siblings=0.3", "gsd", None, {"repeat": 0, "siblings": 0.3}),
        ("clover2=C:/runs/a:taps=8,16:tree=static", "clover2", "C:/runs/a", {"taps": (8, 16), "tree": "static"}),
        ("clover:attention=false", "clover", None, {"attention": False}),
        ("hydra=", "hydra", "", {}),
    ],
)
def test_a_spec_is_parsed(text: str, name: str, folder: str | None, options: dict[str, object]) -> None:
    assert parse_spec(text) == (name, folder, options)


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("gsd", ["gsd"]),
        ("gsd:width=4, clover=runs/a", ["gsd:width=4", "clover=runs/a"]),
        ("clover2:taps=8,16:tree=best,medusa", ["clover2:taps=8,16:tree=best", "medusa"]),
        ("firp:paths=[[0],[0,1]],medusa=runs/a (1),hydra", ["firp:paths=[[0],[0,1]]", "medusa=runs/a (1)", "hydra"]),
    ],
)
def test_specs_are_split(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


def test_options_of_a_spec_go_to_the_method() -> None:
    assert DrafterRequest.of("token_recycling:table=reset").options == {"table": "reset"}
    assert DrafterRequest.of("token_recycling:table=reset", rows=8).rows == 8


@pytest.mark.parametrize(
    ("spec", "given", "message"),
    [
        ("prompt_lookup:max_match=3", {"max_match": 2}, "give it once"),
        ("prompt_lookup:rows=3", {}, "--rows"),
        ("draft_model:model=runs/a", {}, "NAME=FOLDER"),
        ("prompt_lookup:nothing=3", {}, "nothing"),
    ],
)
def test_contradictions_are_refused(spec: str, given: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DrafterRequest.of(spec, **given)
