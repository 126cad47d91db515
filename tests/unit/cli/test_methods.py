"""The listing agrees with the table of methods and with the methods themselves."""

import json

import pytest

from foreword.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_the_table_and_the_method_name_the_same_paper(name):
    assert METHODS[name].paper == METHODS[name].load().paper != ""


def test_table(run):
    shown = run("methods")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert len(lines) == 1 + len(METHODS)  # one line each: output to a pipe is not folded
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
