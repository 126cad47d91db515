"""Trained drafters as folders: config.json, model.safetensors, and what `train` writes next to them. A plan has no weights.

In: a drafter that is bound to its target. Out: a folder that only the same method can load, for the same target or for that
target widened, which computes the same function. For a widened target the drafter's weights are widened too, except a draft
model's, which stays small. Loading is strict: another target, another method, other sizes or a damaged file are refused by
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from foreword.core.drafter import Drafter
from foreword.core.trainable import Trainable
from foreword.drafters.checkpoint import FLOATS, StoredDtype, dtype_name, read_weights, replace_tensor, write_weights
from foreword.drafting.small_model import FirstLayers
from foreword.drafting.standalone import standalone_model
from foreword.errors import DrafterError, InputError
from foreword.files import read_json
from foreword.methods import METHODS, all_methods, find, name_of, trained_as, untrained
from foreword.model import linears as pack
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model
from foreword.model.parameter_limit import TooManyParameters, at_most_parameters
from foreword.model.widened_model import narrow_model
from foreword.model.widening import widened

CONFIG, WEIGHTS = "config.json", "model.safetensors"
EARLIER_DEFAULTS = {"hidden_transfer": {"told": False}}  # values of options that older configs do not have
SLACK = 2  # how many times the weights of its file a drafter may build; within that, `_fill` names the missing tensors
VOCABULARY = "words"  # key of the draft vocabulary: its size in the config, its bitmap in the weights; absent: all tokens


def method_of(drafter: Trainable) -> str:
    """Return the method of a drafter: its registered name, otherwise the name of its file or folder in `methods`."""
    if own := name_of(cast(type[Drafter], type(drafter))):
        return own
    name = type(drafter).__module__.removeprefix("foreword.methods.").split(".")[0]
    return trained_as(name) if name in METHODS else name


def save(drafter: Trainable, folder: str | Path, target: Model, dtype: StoredDtype = "bfloat16") -> None:
    """Write the weights, the draft vocabulary and the config of a drafter to a folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = drafter.module.state_dict()
    if drafter.vocabulary is not None and drafter.vocabulary.bits is not None:
        weights[VOCABULARY] = drafter.vocabulary.bits
    write_weights(weights, folder / WEIGHTS, dtype)
    write_config(drafter, folder, target, dtype)


def write_config(drafter: Trainable, folder: Path, target: Model, dtype: StoredDtype) -> None:
    about: dict[str, Any] = {"method": method_of(drafter), "config": drafter.config, "dtype": dtype}
    about |= {"target": Fingerprint.of(target).to_dict()}
    if drafter.vocabulary is not None and drafter.vocabulary.bits is not None:
        about |= {VOCABULARY: drafter.vocabulary.count}
    _write_json(folder, about)


def save_plan(method: str, plan: dict[str, Any], folder: Path, target: Model) -> None:
    """Write a plan for a target, which is all that a searched method needs: the options that its drafter stores."""
    _write_json(folder, {"method": method, "config": plan, "target": Fingerprint.of_function(target).to_dict()})


def _write_json(folder: Path, about: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(about, indent=1) + "\n")


def read_draft_vocabulary(folder: str | Path) -> Tensor | None:
    """Return the bitmap of a saved drafter's draft vocabulary; None if it proposes all tokens."""
    return read_weights(Path(folder) / WEIGHTS).get(VOCABULARY)


def write_draft_vocabulary(folder: str | Path, bits: Tensor | None, count: int) -> None:
    """Give a saved drafter a draft vocabulary of `count` tokens, or all tokens (`bits` None). Its weights stay as stored."""
    about = read_config(folder)
    replace_tensor(Path(folder) / WEIGHTS, VOCABULARY, bits)
    about.pop(VOCABULARY, None)
    _write_json(Path(folder), about if bits is None else about | {VOCABULARY: count})


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config of a saved drafter: `method`, `config`, `dtype` and `target`."""
    file = Path(folder) / CONFIG
    about = _read_json(file)
    if not isinstance(about, dict) or not {"method", "config", "target"} <= set(about):
        raise DrafterError(f"{file} does not describe a drafter: it needs method, config and target")
    for name, needed in (("method", str), ("config", dict), ("target", dict)):
        if not isinstance(about[name], needed):
            called = "a name" if needed is str else "an object"
            raise _unusable(folder, f"{name} must be {called}")
    return about


def _unusable(folder: str | Path, reason: object) -> DrafterError:
    return DrafterError(f"{Path(folder) / CONFIG} cannot be used ({reason}); copy or train the drafter again")


def _read_json(file: Path) -> Any:
    try:
        return read_json(file)
    except FileNotFoundError as error:
        missing = file if file.parent.is_dir() else f"the folder {file.parent}"
        raise DrafterError(f"{missing} is missing; name the folder of a trained drafter") from error
    except (OSError, ValueError) as error:
        raise DrafterError(f"{file} cannot be read ({error}); copy or train the drafter again") from error


def holds_model(folder: Path) -> bool:
    """Return whether a folder holds a whole model, not a drafter."""
    about = _read_json(folder / CONFIG)
    return isinstance(about, dict) and "model_type" in about and "method" not in about


def outline(folder: str | Path, rows: int | None = None, method: str | None = None, **options: Any) -> Drafter:
    """Make the drafter that a folder describes, not bound and without its weights; or a drafter of another `method` that
    uses such weights, or such a plan. `options` may add to the options it was made with, but not change them."""
    about = read_config(folder)
    held = about["method"]
    if not (held in all_methods() and find(held).fitted):
        raise DrafterError(f"{folder} holds a drafter of {held!r}, which this version of Foreword does not train")
    method = method or held
    try:
        config = EARLIER_DEFAULTS.get(held, {}) | about["config"]
        _check_options(held, config)
        if find(held).searched and method != held:
            config = {"plan": cast(Any, untrained(held, **config)).skip_plan}
        untrained(method, **config)
    except (InputError, TypeError) as error:
        raise _unusable(folder, error) from error
    drafter = untrained(method, rows, **config | options)
    made = _stored_options(drafter)
    for name in options:
        if name in made and made[name] != config.get(name):
            given = f"{name}={options[name]!r} is given, but {folder} was trained with {name}={config.get(name)!r}"
            raise InputError(f"{method}: {given}; leave {name} out")
    return drafter


def _check_options(method: str, config: dict[str, Any]) -> None:
    """Refuse a config with options that the weights of this method do not depend on."""
    stored = _stored_options(untrained(method))
    if unknown := sorted(config.keys() - stored.keys()):
        raise InputError(f"config says {unknown[0]!r}, and a drafter of {method} stores {', '.join(stored)} only")


def _stored_options(drafter: Drafter) -> dict[str, Any]:
    """Return the options that a drafter stores, as they come back from a file."""
    options: dict[str, Any] = json.loads(json.dumps(cast(Trainable, drafter).config))
    return options


def restore(
    folder: str | Path, target: Model, rows: int | None = None, method: str | None = None, **options: Any
) -> Drafter:
    """Load the drafter of a folder with its weights, bound to its target; an engine binds it again, for its slots."""
    drafter = outline(folder, rows, method, **options)
    if find(read_config(folder)["method"]).searched:
        _check_target(folder, target)
        drafter.prepare(target, 1)
        return drafter
    if target.widened_from is None or not find(method or read_config(folder)["method"]).takes_models:
        return _filled(drafter, folder, target)
    drafter = outline(folder, rows, method, model=_draft_model(folder, target), **options)
    if drafter.vocabulary is not None:
        drafter.vocabulary.choose(read_draft_vocabulary(folder))
    drafter.prepare(target, 1)
    return drafter


def as_model(folder: str | Path, target: Model) -> Any:
    """Return a drafter of draft_model as a transformers model, with the embedding and head of its target. If the target was
    widened, the model has the width, embedding and head that the target had before."""
    check_draft_model(folder)
    module = cast(FirstLayers, cast(Trainable, _filled(outline(folder), folder, target)).module)
    small = standalone_model(target, module, target.device)
    return small if target.widened_from is None else narrow_model(small, target.widened_from.times)


def check_draft_model(folder: str | Path) -> None:
    """Refuse a folder that holds no drafter of draft_model."""
    if holds_model(Path(folder)):
        raise DrafterError(f"{folder} holds a whole model already; use it directly")
    held = read_config(folder)["method"]
    if not (held in METHODS and METHODS[held].takes_models):
        found = f"{folder} holds a drafter of {held!r}, which is no model by itself"
        raise DrafterError(f"{found}; give one that `foreword train draft_model` wrote")


def _draft_model(folder: str | Path, target: Model) -> Model:
    """Load the same model for drafting, with its layers rebuilt for speed."""
    small = as_model(folder, target)
    pack.rebuild(small, target.device, target.dtype)
    return Model(small, str(folder))


def restore_unchecked(folder: str | Path, target: Model, rows: int | None = None, **options: Any) -> Drafter:
    """Load the drafter of a folder for a target that another engine has loaded, and that the caller compared with it."""
    return _with_weights(outline(folder, rows, **options), folder, target)


def _filled(drafter: Drafter, folder: str | Path, target: Model) -> Drafter:
    """Build a drafter for its target, and load its weights."""
    _check_target(folder, target)
    return _with_weights(drafter, folder, target)


def _with_weights(drafter: Drafter, folder: str | Path, target: Model) -> Drafter:
    weights = read_weights(Path(folder) / WEIGHTS)
    _build(drafter, folder, target, sum(weight.numel() for weight in weights.values()))
    _fill(cast(Trainable, drafter), weights, folder, target)
    return drafter


def _build(drafter: Drafter, folder: str | Path, target: Model, held: int) -> None:
    """Prepare a drafter, but refuse to build far more weights than its file holds. `_fill` then names wrong tensors."""
    wider = 1 if target.widened_from is None else target.widened_from.times**2
    try:
        with at_most_parameters(SLACK * wider * held):
            drafter.prepare(target, 1)
    except TooManyParameters as error:
        found = f"{Path(folder) / CONFIG} asks for far more weights than the {held} numbers that {WEIGHTS} holds"
        raise DrafterError(f"{found}; copy or train the drafter again") from error
    except InputError as error:
        raise _unusable(folder, error) from error


def trained_for(folder: str | Path) -> Fingerprint:
    """Return the fingerprint of the model that a drafter was trained for."""
    try:
        return Fingerprint.from_dict(read_config(folder)["target"])
    except (TypeError, ValueError) as error:
        file = Path(folder) / CONFIG
        raise DrafterError(
            f"{file} does not say which model it was trained for ({error}); copy or train the drafter again"
        ) from error


def load_into(drafter: Trainable, folder: str | Path, target: Model) -> None:
    """Load saved weights into the module of a bound drafter."""
    about, method = read_config(folder), method_of(drafter)
    if about["method"] != method:
        raise DrafterError(f"{folder} holds a drafter of {about['method']}, not of {method}; choose that method")
    _check_target(folder, target)
    own = _stored_options(cast(Drafter, drafter))
    if own != about["config"]:
        raise DrafterError(f"{method}: made with {own}, but {folder} was trained with {about['config']}; use those options")
    _fill(drafter, read_weights(Path(folder) / WEIGHTS), folder, target)


def _check_target(folder: str | Path, target: Model) -> None:
    expected, found = trained_for(folder), Fingerprint.of_function(target)
    if not expected.matches(found):
        method = read_config(folder)["method"]
        raise DrafterError(
            f"{method}: trained for {expected}, but the target is {found}; load the matching drafter or target, or train one"
        )


@torch.no_grad()
def _fill(drafter: Trainable, weights: dict[str, Tensor], folder: str | Path, target: Model) -> None:
    places, vocabulary = drafter.module.state_dict(), weights.pop(VOCABULARY, None)
    _check_names(Path(folder) / WEIGHTS, weights, places)
    _check_dtypes(Path(folder) / WEIGHTS, weights, places)
    if original := target.widened_from:
        wide, times, hidden = drafter.wide, original.times, target.hidden_size // original.times
        weights = {name: widened(name, one.to(target.device), wide, times, hidden) for name, one in weights.items()}
    _check_shapes(Path(folder) / WEIGHTS, weights, places)
    if drafter.vocabulary is not None:
        drafter.vocabulary.choose(vocabulary)
    for name, place in places.items():
        place.copy_(weights[name])


def _check_names(file: Path, weights: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
    wrong = sorted(set(weights) ^ set(places))
    if wrong:
        where = "lacks" if wrong[0] in places else "has an unknown"
        raise DrafterError(f"{file} {where} tensor {wrong[0]!r}; copy or train the drafter again")


def _check_dtypes(file: Path, weights: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
    """Check what must hold before weights can be widened, which changes their shapes: dtypes and numbers of dimensions."""
    for name, weight in weights.items():
        if weight.dtype not in FLOATS or weight.dim() != places[name].dim():
            found = f"{file}: {name} is {dtype_name(weight)} of shape {tuple(weight.shape)}"
            needed = f"floats, or int8 or int4 with scales, in {places[name].dim()} dimensions"
            raise DrafterError(f"{found}, but must be {needed}; copy or train the drafter again")


def _check_shapes(file: Path, weights: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
    for name, place in places.items():
        if weights[name].shape != place.shape:
            found = f"{file}: {name} has shape {tuple(weights[name].shape)}, but needs {tuple(place.shape)}"
            raise DrafterError(f"{found}; copy or train the drafter again")
