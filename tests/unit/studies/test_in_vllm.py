"""The study of our drafters inside vLLM: how it counts."""

import pytest

from in_vllm import Output, figures, one_request


class Steps:
    """An engine of vLLM whose steps are known: the tokens of the output after each."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def add_request(self, *_: object) -> None:
        self.left = list(self.lengths)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list["Steps"]:
        self.length = self.left.pop(0)
        return [self] if self.length else []

    @property
    def outputs(self) -> list["Steps"]:
        return [self]

    @property
    def token_ids(self) -> range:
        return range(self.length)


def test_a_pass_counts_if_it_decided_tokens() -> None:
    """Not the step that read a part of a prompt, nor one that gave nothing new."""
    assert one_request(Steps([0, 1, 4, 4, 6]), "1", [5], None) == Output([0, 1, 2, 3, 4, 5], 3)


def test_accepted_tokens_are_those_beyond_one_per_pass() -> None:
    plain = [{"tokens": [1, 2, 3]}, {"tokens": [4, 5]}]
    found = {
        "outputs": [{"tokens": [1, 2, 3], "passes": 2}, {"tokens": [4, 6], "passes": 1}],
        "counters": {"vllm:spec_decode_num_drafts": 3},
    }
    assert figures(found, plain) == {
        "tokens": 5,
        "passes": 3,
        "accepted": 2,
        "identical": 1,
        "tokens_per_pass": pytest.approx(5 / 3),
        "counters": {"spec_decode_num_drafts": 3},
    }
