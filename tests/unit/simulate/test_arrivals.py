"""Loads: random arrivals and lengths from a seed, and recorded traces."""

from statistics import mean, median

import pytest

from foreword.errors import InputError
from foreword.simulate.arrivals import Arrival, Lengths, poisson, read_arrivals


def test_arrivals_are_as_often_and_as_long_as_asked():
    found = poisson(5.0, 4000, Lengths.parse("100-200"), Lengths.parse("exp:50"), seed=2)
    assert found == sorted(found) == poisson(5.0, 4000, Lengths.parse("100-200"), Lengths.parse("exp:50"), seed=2)
    assert found[-1].second == pytest.approx(800, rel=0.1)
    prompts, outputs = [one.prompt_tokens for one in found], [one.output_tokens for one in found]
    assert (min(prompts), max(prompts)) == (100, 200) and mean(prompts) == pytest.approx(150, rel=0.02)
    assert min(outputs) == 1 and mean(outputs) == pytest.approx(50, rel=0.1)
    heavy = [one.prompt_tokens for one in poisson(1.0, 4000, Lengths.parse("lognormal:300:1.0"), Lengths.parse("7"))]
    assert median(heavy) == pytest.approx(300, rel=0.1) and mean(heavy) > 1.4 * median(heavy)


@pytest.mark.parametrize("spec", ["", "0", "9-3", "-5", "exp:", "exp:-1", "exp:nan", "lognormal:3", "1e9", "normal:3"])
def test_lengths_that_mean_nothing_are_refused(spec):
    with pytest.raises(InputError, match="is no distribution of lengths"):
        Lengths.parse(spec)


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path):
    file = tmp_path / "trace.jsonl"
    late = '{"arrival": 12.5, "prompt_tokens": 7, "output_tokens": 3, "session": "a", "user": "ignored"}'
    file.write_text(f'{late}\n\n{{"arrival": 10, "prompt_tokens": 5, "output_tokens": 1}}\n')
    assert read_arrivals(file) == [Arrival(0.0, 5, 1), Arrival(2.5, 7, 3, "a")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "has no requests"),
        ("{", "line 1: no JSON"),
        ("[1]", "line 1: no JSON object"),
        ('{"prompt_tokens": 1, "output_tokens": 1}', "line 1: arrival is None"),
        ('{"arrival": true, "prompt_tokens": 1, "output_tokens": 1}', "line 1: arrival is True"),
        ('{"arrival": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 1: prompt_tokens is 0"),
        ('{"arrival": 1, "prompt_tokens": 1, "output_tokens": 2.5}', "line 1: output_tokens is 2.5"),
        ('{"arrival": 1, "prompt_tokens": 1, "output_tokens": 1, "session": 3}', "line 1: session is 3"),
        ('{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 1: no JSON"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, line, said):
    file = tmp_path / "trace.jsonl"
    file.write_text(line)
    with pytest.raises(InputError, match=said):
        read_arrivals(file)


def test_a_trace_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_arrivals(tmp_path / "nothing.jsonl")
