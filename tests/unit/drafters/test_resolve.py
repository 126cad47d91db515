"""From what a user asks for to a drafter that is ready: folders that name their method, and what is refused, and when."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from doubles import TRAINED, with_random_weights
from foreword.core.trainable import Trainable
from foreword.drafters.checkpoint import read_weights
from foreword.drafters.resolve import DrafterRequest
from foreword.drafters.saved import restore, save
from foreword.errors import DrafterError, InputError, UnknownMethod
from foreword.methods import trained_as
from foreword.model.model import Model

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> Model:
    return Model(AutoModelForCausalLM.from_pretrained(folders["llama"]), name="tiny")


@pytest.fixture(scope="module")
def other(talking: Any) -> Model:
    """The same sizes, other weights."""
    return Model(talking("llama", seed=1), name="another")


@pytest.fixture
def clover(trained: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(trained["clover"], tmp_path / "clover"))


def change(folder: Path, **fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


# What a folder decides ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", TRAINED)
def test_a_folder_decides_method_and_options(method: str, trained: dict[str, Path], model: Model) -> None:
    """With the method named or not, in a spec or by keyword; the weights are those of the file."""
    held = load_file(trained[method] / "model.safetensors")
    assert DrafterRequest.of(drafter=trained[method]).method == trained_as(method)
    for request in (
        DrafterRequest.of(drafter=trained[method], rows=8),
        DrafterRequest.of(method, str(trained[method]), 8),
        DrafterRequest.of(f"{method}={trained[method]}", rows=8),
    ):
        name, drafter = request.resolve(model)
        found: Any = drafter
        assert (name, found.shape.nodes + found.needs.grafted_rows) == (request.method, 8)
        asked = {option: list(value) if isinstance(value, tuple) else value for option, value in TRAINED[method].items()}
        assert found.config == {option: asked.get(option, value) for option, value in found.config.items()}
        for key, weight in found.module.state_dict().items():
            assert torch.equal(weight, held[key].float()), key


def test_options_that_are_not_trained_can_be_given(trained: dict[str, Path], model: Model) -> None:
    _, drafter = DrafterRequest.of("clover", trained["clover"], rows=8, tree="best", width=2, heads=3).resolve(model)
    assert type(drafter.growth).__name__ == "BestFirst"  # type: ignore[attr-defined]


def test_taps_are_the_same_in_any_order(trained: dict[str, Path], model: Model) -> None:
    _, drafter = DrafterRequest.of("clover2", trained["clover2"], rows=8, taps=(2, 0)).resolve(model)
    assert drafter.needs.taps == (0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 2}, "clover: heads=2 is given, but .*clover was trained with heads=3; leave heads out"),
        ({"block": "none"}, "block='none' is given.*block='full'"),
        ({"colour": 1}, "clover: no option is called 'colour'"),
        ({"rows": 0}, "rows is 0"),
    ],
)
def test_options_that_contradict_the_folder(options: dict[str, Any], message: str, trained: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=message):
        DrafterRequest.of("clover", trained["clover"], **options)


# What is refused before a model is there ----------------------------------------------------------------------------------


def test_another_method_than_the_folders(trained: dict[str, Path]) -> None:
    with pytest.raises(DrafterError, match="medusa holds a drafter of medusa, not of clover; choose medusa"):
        DrafterRequest.of("clover", trained["medusa"])
    with pytest.raises(DrafterError, match="prompt_lookup has no weights of its own"):
        DrafterRequest.of("prompt_lookup", trained["medusa"])
    with pytest.raises(UnknownMethod, match="'clover'"):
        DrafterRequest.of("clovr", trained["clover"])
    with pytest.raises(InputError, match="give one of them"):
        DrafterRequest.of(f"clover={trained['clover']}", trained["clover"])


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, message in (("none", "the folder .*none is missing"), (".", "config.json is missing"), ("file", "file")):
        with pytest.raises(DrafterError, match=message):
            DrafterRequest.of(drafter=tmp_path / folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "does not describe a drafter"),
        ('{"method": "clover"}', "needs method, config and target"),
        ('{"method": "clover9", "config": {}, "target": {}}', "'clover9', which this version of Foreword does not train"),
        ('{"method": "plain", "config": {}, "target": {}}', "'plain', which this version"),
        ('{"method": "clover", "config": {"colour": 1}, "target": {}}', "cannot be used .*'colour'"),
        ('{"method": "clover", "config": [], "target": {}}', "cannot be used"),
        ('{"method": ["clover"], "config": {}, "target": {}}', r"cannot be used \(method must be a name\)"),
        ('{"method": "clover", "config": {}, "target": "x"}', r"cannot be used \(target must be an object\)"),
        ('{"method": "clover", "config": {"rows": 8}, "target": {}}', "cannot be used .*'rows'.*stores heads, block"),
        ('{"method": "draft_model", "config": {"model": "x"}, "target": {}}', "cannot be used .*'model'"),
        ('{"method": "medusa", "config": {"rates": {}}, "target": {}}', "cannot be used .*rates is {}"),
        ('{"method": ' + "[" * 100_000, "cannot be read .*nest deeper"),
        ('{"method": ' + "9" * 5_000, "cannot be read .*4300 digits"),
    ],
    ids=lambda value: value[:60],
)
def test_a_damaged_description(text: str, message: str, clover: Path) -> None:
    (clover / "config.json").write_text(text)
    with pytest.raises(DrafterError, match=message):
        DrafterRequest.of(drafter=clover)


def test_an_option_without_its_method() -> None:
    with pytest.raises(InputError, match="table: an option belongs to one method"):
        DrafterRequest.of(table="reset")


# What is refused once it is there -----------------------------------------------------------------------------------------


def test_another_target_is_refused_with_both_names(trained: dict[str, Path], other: Model, folders: dict[str, Path]) -> None:
    name = folders["llama"].name
    with pytest.raises(DrafterError, match=f"clover: trained for {name} .*, but the target is another .*train one"):
        DrafterRequest.of(drafter=trained["clover"]).resolve(other)


def test_a_folder_that_does_not_say_whose_it_is(clover: Path, model: Model) -> None:
    with pytest.raises(DrafterError, match="does not say which model it was trained for"):
        DrafterRequest.of(drafter=change(clover, target={"name": "x"})).resolve(model)


@pytest.mark.parametrize(
    "changed", [{"vocab_size": "9"}, {"few": "a b"}, {"few": 3}, {"name": None}, {"colour": 1}], ids=str
)
def test_a_fingerprint_that_is_none(changed: dict[str, Any], clover: Path, model: Model) -> None:
    target = json.loads((clover / "config.json").read_text())["target"]
    with pytest.raises(DrafterError, match="does not say which model it was trained for"):
        DrafterRequest.of(drafter=change(clover, target=target | changed)).resolve(model)


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("medusa", {"heads": 200_000}),
        ("medusa", {"layers": 100_000}),
        ("hydra", {"heads": 200_000}),
        ("hydra", {"layers": 100_000}),
        ("clover", {"heads": 10**18}),
        ("hidden_transfer", {"steps": 100_000, "layers": None}),
    ],
    ids=str,
)
def test_a_config_that_asks_for_more_than_the_weights_hold(
    method: str, changed: dict[str, Any], trained: dict[str, Path], model: Model, tmp_path: Path
) -> None:
    """Building stops once there are more weights than the file could fill."""
    folder = Path(shutil.copytree(trained[method], tmp_path / method))
    config = json.loads((folder / "config.json").read_text())["config"]
    with pytest.raises(DrafterError, match="config.json asks for far more weights than the .* copy or train"):
        DrafterRequest.of(drafter=change(folder, config=config | changed)).resolve(model)


def test_a_config_that_asks_for_more_of_the_targets_layers(trained: dict[str, Path], talking: Any, tmp_path: Path) -> None:
    """Copies of the target's layers count like new weights."""
    deep = Model(talking("llama", num_hidden_layers=6), name="deep")
    folder = tmp_path / "small"
    save(cast(Trainable, with_random_weights("draft_model", deep, layers=1)), folder, deep)
    with pytest.raises(DrafterError, match="asks for far more weights"):
        DrafterRequest.of(drafter=change(folder, config={"layers": 6})).resolve(deep)


def test_int8_weights_come_with_their_scales(trained: dict[str, Path], model: Model, tmp_path: Path) -> None:
    save(cast(Trainable, restore(trained["clover"], model)), tmp_path, model, "int8")
    file = tmp_path / "model.safetensors"
    held = {name: weight.clone() for name, weight in load_file(file).items()}
    matrix, scale, norm = "heads.0.linear.weight", "heads.0.linear.weight.scale", "norm.weight"
    off = read_weights(file)[matrix] - cast(Trainable, restore(trained["clover"], model)).module.state_dict()[matrix]
    assert (off.abs() <= 0.51 * held[scale]).all(), "rounded to the nearest step"
    for damaged, message in (
        ({scale: held[scale][:3]}, rf"{scale} is float32 \(3, 1\), but must be floats \(32, 1\)"),
        ({scale: held[scale].squeeze(1)}, rf"{scale} is float32 \(32,\)"),
        ({scale: held[scale].long()}, f"{scale} is int64"),
        ({scale: -held[scale]}, rf"{scale} holds -\S+, but scales must be above 0 and finite"),
        ({scale: 0 * held[scale]}, f"{scale} holds 0, but scales must be above 0"),
        ({scale: held[scale].index_fill(0, torch.tensor([5]), torch.nan)}, f"{scale} holds nan, but scales must be above 0"),
        ({scale: held[scale].index_fill(0, torch.tensor([5]), torch.inf)}, f"{scale} holds inf, but scales must be above 0"),
        ({matrix: held[matrix].float()}, f"{scale} belongs to an int8 or int4 matrix, but the file has {matrix} as float32"),
        ({norm: held[norm].long()}, f"{norm} is int64 .*must be floats"),
        ({norm: held[norm].to(torch.int8)}, f"{norm} is int8 .*must be floats"),
        ({norm: held[norm].sum()}, rf"{norm} is bfloat16 of shape \(\), .*in 1 dimensions"),
        ({"more.scale": held[scale]}, "more.scale belongs to an int8 or int4 matrix, but the file has no tensor more"),
        ({"words": held[norm]}, "its draft vocabulary is a bitmap of 32 bytes"),
    ):
        save_file({name: one.contiguous().clone() for name, one in (held | damaged).items()}, file)
        with pytest.raises(DrafterError, match=message):
            restore(tmp_path, model)
    save_file({name: one for name, one in held.items() if name != scale}, file)
    with pytest.raises(DrafterError, match=f"{matrix} is int8"):
        restore(tmp_path, model)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b"{}",
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,400000000000]}}',
    ],
    ids=["nested", "empty", "overlapping", "huge", "beyond the file"],
)
def test_weights_whose_header_lies(header: bytes, clover: Path, model: Model) -> None:
    for length in (len(header), 2**63, 10**8 - 1):
        (clover / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(DrafterError, match="copy or train the drafter again"):
            restore(clover, model)


def test_damaged_weights(clover: Path, model: Model) -> None:
    file = clover / "model.safetensors"
    whole, held = file.read_bytes(), {name: weight.clone() for name, weight in load_file(file).items()}
    request = DrafterRequest.of(drafter=clover)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DrafterError, match="model.safetensors cannot be read"):
        request.resolve(model)
    name = "norm.weight"
    for damaged, message in (
        ({**held, name: held[name][:3].clone()}, rf"{name} has shape \(3,\), but needs \(32,\)"),
        ({key: value for key, value in held.items() if key != name}, f"lacks tensor '{name}'"),
        ({**held, "more": held[name].clone()}, "has an unknown tensor 'more'"),
    ):
        save_file(damaged, file)
        with pytest.raises(DrafterError, match=message):
            request.resolve(model)
    file.unlink()
    with pytest.raises(DrafterError, match="model.safetensors is missing"):
        restore(clover, model)


# Drafters that two methods take -------------------------------------------------------------------------------------------


def test_a_draft_model_serves_gsd_too(trained: dict[str, Path], ship: Callable[[Path], Path], model: Model) -> None:
    """By its folder, or because it ships; a folder alone gives the method that it was trained for."""
    folder = trained["draft_model"]
    for request in (DrafterRequest.of("gsd", folder, rows=8, repeat=-1), DrafterRequest.of(f"gsd={folder}", rows=8)):
        name, drafter = request.resolve(model)
        assert name == "gsd" and type(drafter).__name__ == "Gsd"
    assert DrafterRequest.of(drafter=folder).method == "draft_model"
    with pytest.raises(DrafterError, match="holds a drafter of draft_model, not of clover"):
        DrafterRequest.of("clover", folder)
    with pytest.raises(DrafterError, match="holds a drafter of medusa, not of gsd"):
        DrafterRequest.of("gsd", trained["medusa"])
    with pytest.raises(DrafterError, match="gsd has weights.*`foreword train draft_model`"):
        DrafterRequest.of("gsd")
    ship(folder)
    assert DrafterRequest.of("gsd", rows=8).resolve(model)[0] == "gsd"
    with pytest.raises(InputError, match="gsd: layers=1 is given, but .* trained with layers=2"):
        DrafterRequest.of("gsd", layers=1)


# Shipped ------------------------------------------------------------------------------------------------------------------


def test_a_method_takes_the_drafter_that_ships_for_the_model(
    trained: dict[str, Path], ship: Callable[[Path], Path], model: Model
) -> None:
    ship(trained["medusa"])
    name, drafter = DrafterRequest.of("medusa", rows=8).resolve(model)
    assert name == "medusa" and drafter.heads == 3  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="heads=5 is given"):
        DrafterRequest.of("medusa", heads=5)


def test_none_ships_for_the_model(
    trained: dict[str, Path], ship: Callable[[Path], Path], other: Model, folders: dict[str, Path]
) -> None:
    with pytest.raises(DrafterError, match="no drafter of it ships.*`foreword train medusa`.*--drafter FOLDER"):
        DrafterRequest.of("medusa")
    ship(trained["medusa"])
    message = f"no drafter of it ships for another \\(there is one for {folders['llama'].name}\\)"
    with pytest.raises(DrafterError, match=message):
        DrafterRequest.of("medusa").resolve(other)
