"""The listing says what the table and the methods themselves say."""

import json

import pytest

from foreword.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_the_table_names_the_paper_that_the_method_names(name):
    assert METHODS[name].paper == METHODS[name].load().paper != ""


def test_table(run):
    shown = run("methods")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert len(lines) == 1 + len(METHODS)  # one line each: a pipe is not folded
    for line, (name, method) in zip(lines[1:], METHODS.items(), strict=True):
        assert line.split()[0] == name
        assert method.summary in line and method.paper in line


def test_json(run):
    listed = json.loads(run("methods", "--json").stdout)["methods"]
    assert list(listed) == list(METHODS)
    assert listed["token_recycling"] == {
        "summary": METHODS["token_recycling"].summary,
        "trained": False,
        "paper": "Token Recycling, arXiv 2408.08696",
        "ships_for": None,
    }
