"""Unknown keywords: refused with the reason or the nearest names; options of a method are passed on to it."""

from typing import Any

import pytest

import foreword
from foreword.drafters.keywords import OTHER_NAMES, UNSUPPORTED, options_of_method
from foreword.errors import DrafterError, InputError, UnknownMethod


def refused(match: str, *method: str, **given: Any) -> None:
    """Assert that keywords are refused, before the model is looked for: there is none."""
    with pytest.raises(InputError, match=match) as caught:
        foreword.load("no/such/model", *method, **given)
    assert "belongs to one method" not in str(caught.value)


@pytest.mark.parametrize("method", ["auto", "plain", "medusa"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_features_are_refused_with_the_reason(name: str, method: str) -> None:
    refused(f"^{name}=2: .*", method, **{name: 2})


def test_some_reasons() -> None:
    refused("trust_remote_code=True: Foreword runs no code that comes with a model", trust_remote_code=True)
    refused("tensor_parallel_size=4: .*tp=N divides a model over N devices.*device=", tensor_parallel_size=4)
    refused("load_in_4bit=True: .*quantised.*wrap", load_in_4bit=True)


@pytest.mark.parametrize(
    "given", [{"trust_remote_code": False}, {"tensor_parallel_size": 1}, {"quantization_config": None}], ids=str
)
def test_unsupported_features_may_be_turned_off(given: dict[str, Any]) -> None:
    assert options_of_method(foreword.load, "auto", given) == {}


@pytest.mark.parametrize(("name", "meant"), [*OTHER_NAMES.items(), ("revison", "revision"), ("max_contex", "max_context")])
@pytest.mark.parametrize("method", ["auto", "plain"])
def test_the_nearest_name_is_suggested(name: str, meant: str, method: str) -> None:
    refused(f"{name!r}; did you mean '{meant}'.*drafter, rows, slots, max_context, device, dtype", method, **{name: "x"})


def test_a_name_that_is_near_to_none() -> None:
    refused(
        r"^load takes no 'colour'; it takes: drafter, rows, .*generation_config, warm_up, isolated, tp, slow$",
        colour="red",
    )
    refused(
        r"^plain: no option is called 'colour'; there are: rows; load itself takes: drafter, rows", "plain", colour="red"
    )


def test_the_options_of_the_method_are_near_too() -> None:
    refused(r"^token_recycling: no option is called 'tabel'; did you mean 'table'", "token_recycling", tabel=3)


@pytest.mark.parametrize("call", [foreword.wrap, foreword.LLM.use])
def test_other_calls_name_their_own(call: Any) -> None:
    with pytest.raises(InputError, match=f"{call.__name__} takes no 'colour'; it takes: drafter"):
        options_of_method(call, "auto", {"colour": 1})


def test_an_option_of_some_method_needs_the_method_s_name() -> None:
    with pytest.raises(InputError, match="table: an option belongs to one method; name the method too"):
        foreword.load("no/such/model", table="none")


def test_what_others_refuse_is_left_to_them() -> None:
    assert options_of_method(foreword.load, "nonsense", {"colour": 1}) == {"colour": 1}
    with pytest.raises(UnknownMethod, match="'nonsense'"):
        foreword.load("no/such/model", "nonsense", colour=1)
    with pytest.raises(DrafterError, match="no/such/drafter"):
        foreword.load("no/such/model", "medusa=no/such/drafter", heads=2)
