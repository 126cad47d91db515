"""The options of replicas: files and arguments that are read, and what is refused by name. Without Ray."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from foreword.errors import ForewordError, InputError
from foreword.serve import ray as replicas
from foreword.serve.options import ServeOptions, digest
from foreword.serve.ray.options import RayOptions, deployment_of, read_options

EXAMPLES = Path(__file__).parents[3] / "examples"


def written(folder: Path, text: str) -> Path:
    file = folder / "ray.toml"
    file.write_text(text)
    return file


def test_the_example_has_every_key_with_its_default_and_a_comment() -> None:
    text = (EXAMPLES / "ray.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text) == msgspec.structs.asdict(RayOptions())
    undocumented = [line for line in text.splitlines() if re.match(r"\w+ = ", line) and "#" not in line]
    assert undocumented == ['metrics_host = "127.0.0.1"']
    assert read_options(EXAMPLES / "ray.toml") == RayOptions()


def test_the_example_for_a_cluster_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREWORD_API_KEY", raising=False)
    (application,) = yaml.safe_load((EXAMPLES / "ray_serve.yaml").read_text(encoding="utf-8"))["applications"]
    assert application["import_path"] == "foreword.serve.ray:app" and callable(replicas.app)
    keys = tmp_path / "keys"
    keys.write_text("secret")
    application["args"]["server"]["api_key_file"] = str(keys)
    found = deployment_of(application["args"])
    assert (found.slots, found.engine["isolated"], found.replicas.max_replicas, found.replicas.gpus) == (16, True, 4, 1)
    assert found.server == ServeOptions(key_digests=(digest("secret"),))


def test_serve_run_gives_all_values_as_text() -> None:
    found = deployment_of({"replicas": "3", "cpus": "0.5", "metrics_host": "::1"}).replicas
    assert (found.replicas, found.cpus, found.metrics_host) == (3, 0.5, "::1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replcas = 2", r"unknown field `replcas`; there are .*\breplicas\b"),
        ("engine = {}", "unknown field `engine`"),
        ('replicas = "two"', r"Expected `int`, got `str` - at `\$.replicas`"),
        ("replicas = 0", r"Expected `int` >= 1 - at `\$.replicas`"),
        ("cpus = 0", r"at `\$.cpus`"),
        ("max_replicas = 1", "max_replicas is 1, below the 2 of replicas"),
        ("tp = 2", "unknown field `tp`"),
        ("replicas 2", "cannot read"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_options(written(tmp_path, text))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"slots": 8}, "unknown field `slots`"),
        ({"gpus": 1, "engine": {"tp": 2}}, "gpus is 1, but an engine with tp = 2 needs as many"),
        ({"server": {"prot": 1}}, "server has an unknown field `prot`; it may have allow_origins, api_key_file"),
        ({"server": {"switch_methods": True}}, "server has an unknown field `switch_methods`"),
        ({"server": {"max_queued": "many"}}, r"server cannot be used: .*max_queued"),
        ({"server": {"api_key_file": "/no/such/file"}}, "cannot read /no/such/file"),
    ],
)
def test_arguments_that_cannot_be_used(args: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        deployment_of(args)


def test_a_replica_has_a_few_requests_more_than_slots() -> None:
    assert RayOptions().ongoing_of(16) == 20 and RayOptions(ongoing=5).ongoing_of(16) == 5
    assert not RayOptions().scales and RayOptions(max_replicas=3).scales


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "NEEDED", ("msgspec", "no_such_package"))
    with pytest.raises(ForewordError, match=r"need no_such_package; install the extra: pip install 'foreword\[ray\]'"):
        replicas.app({})
