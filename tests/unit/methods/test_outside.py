"""Methods of other packages: registered by name, given as a drafter, a class or a folder, or found by an entry point."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import foreword
import foreword.methods as table
from foreword import Draft, Drafter, Shape, State, Target, Tree
from foreword.cli.app import app
from foreword.errors import ForewordWarning, InputError, UnknownMethod

pytestmark = pytest.mark.usefixtures("own_home")

ASKED = {"max_new_tokens": 16, "ignore_eos": True}
PROMPTS = ["the words that come before the words", "one two three", "a"]


class Again(Drafter):
    """Draft the newest token once more.

    Nothing else.
    """

    paper = "a paper"

    def __init__(self, rows: int | None = None, times: int = 2) -> None:
        self.nodes = rows or times + 1

    def bind(self, target: Target, slots: int) -> None:
        self.shape = Shape(self.nodes, self.nodes - 1)
        self.tree = Tree.chain(self.nodes, target.device)

    def propose(self, state: State) -> Draft:
        tokens = state.root.unsqueeze(1).expand(-1, self.nodes)
        return Draft(tokens, self.tree, torch.full_like(state.root, self.nodes))


class Rowless(Again):
    """The same without an option."""

    def __init__(self) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it, and entry points are looked up anew."""
    before = dict(table.METHODS)
    table._discover.cache_clear()
    yield
    table.METHODS.clear()
    table.METHODS.update(before)
    table._discover.cache_clear()


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], own_home: Path) -> list[list[int]]:
    with foreword.load(folders["llama"], "plain") as llm:
        return [one.tokens for one in llm.generate(PROMPTS, **ASKED)]


def tokens(llm: foreword.LLM) -> list[list[int]]:
    return [one.tokens for one in llm.generate(PROMPTS, **ASKED)]


# Ways to give one --------------------------------------------------------------------------------------------------------


def test_a_registered_method_is_used_by_its_name(folders: dict[str, Path], expected: list[list[int]]) -> None:
    foreword.register("again", Again)
    with foreword.load(folders["llama"], "again:times=3") as llm:
        assert (llm.method, llm.engine.drafter.shape.nodes, tokens(llm)) == ("again", 4, expected)
        assert tokens(llm.use("again", rows=2)) == expected and llm.engine.drafter.shape.nodes == 2
        assert llm.use(Again).method == "again"


@pytest.mark.parametrize("method", [Again, Again(times=4), Rowless], ids=["class", "drafter", "no rows"])
def test_a_drafter_and_its_class_are_methods(
    method: Drafter | type[Drafter], folders: dict[str, Path], expected: list[list[int]]
) -> None:
    with foreword.load(folders["llama"], method) as llm:
        assert tokens(llm) == expected
        assert llm.method == (method.__name__ if isinstance(method, type) else "Again")
        assert tokens(llm.use("plain").use(method)) == expected  # a drafter that is bound again


def test_wrap_takes_them_too(talking: Callable[..., object], hf_tokenizer: object) -> None:
    with foreword.wrap(talking(), hf_tokenizer, Again, times=1) as llm:  # type: ignore[arg-type]
        assert llm.engine.drafter.shape.nodes == 2


@pytest.mark.parametrize("as_path", [True, False])
def test_a_folder_is_a_method(as_path: bool, folders: dict[str, Path], trained: dict[str, Path]) -> None:
    folder = trained["medusa"] if as_path else str(trained["medusa"])
    with foreword.load(folders["llama"], folder, rows=4) as llm:
        by_method = tokens(llm)
        assert llm.method == "medusa" and tokens(llm.use(drafter=trained["medusa"], rows=4)) == by_method
        assert llm.use(f"{trained['medusa']}:tree=best").method == "medusa"


def test_a_folder_of_an_unknown_name_is_pointed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UnknownMethod, match=r"the folder of that name is './mine'"):
        foreword.load("/nowhere", "mine")


# What is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "auto", "My Method", "a=b", "", 3])
def test_a_name_must_be_free_and_plain(name: str) -> None:
    with pytest.raises(InputError, match="called"):
        foreword.register(name, Again)


def test_the_same_class_may_be_registered_again() -> None:
    foreword.register("again", Again)
    foreword.register("again", Again)
    with pytest.raises(InputError, match="'again' already; choose another name"):
        foreword.register("again", Rowless)


@pytest.mark.parametrize("given", [int, Again(), "plain", None])
def test_a_method_is_a_class_of_drafters(given: object) -> None:
    with pytest.raises(InputError, match=r"inherits from foreword.Drafter"):
        foreword.register("again", given)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [None, 3, int, object()])
def test_what_is_no_method_is_refused_before_a_model_is_loaded(method: object) -> None:
    with pytest.raises(InputError, match=r"give a name that `foreword methods` lists, the folder"):
        foreword.load("/nowhere", method)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        (Again, {"colour": 1}, "Again: no option is called 'colour'.*there are: rows, times"),
        (Again, {"times": "many"}, "Again: times is 'many'; it must be a whole number"),
        (Again, {"drafter": "/x"}, "register the class"),
        (Again(), {"rows": 3}, r"made already, and rows is given too; give it to Again\(...\)"),
        (Again(), {"times": 3}, "made already, and times is given too"),
        (Rowless, {"rows": 3}, "Rowless: rows is 3, and this method takes no rows"),
        (Path("/x"), {"drafter": "/y"}, "names a drafter, and '/y' is given too"),
    ],
)
def test_options_that_do_not_fit_are_refused(method: object, given: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        foreword.load("/nowhere", method, **given)  # type: ignore[arg-type]


# Packages ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A package as pip leaves it: a module, and a dist-info folder with its entry points."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outside_package", raising=False)

    def put(code: str, entries: str) -> None:
        (tmp_path / "outside_package.py").write_text(code)
        about = tmp_path / "outside_package-1.5.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.5\n")
        (about / "entry_points.txt").write_text(f"[foreword.methods]\n{entries}\n")

    return put


GOOD = f"import sys\nAgain = sys.modules[{__name__!r}].Again\nplain = Again\nThing = 5\n"


def test_a_package_brings_a_method(
    install: Callable[[str, str], None], folders: dict[str, Path], expected: list[list[int]], tmp_path: Path
) -> None:
    """In `load`, in the list of methods, and in `prove` and `generate` of the command line."""
    install(GOOD, "again = outside_package:Again")
    with foreword.load(folders["llama"], "again") as llm:
        assert tokens(llm) == expected
    line = CliRunner()
    listed = json.loads(line.invoke(app, ["methods", "--json"]).stdout)["methods"]
    assert listed["again"] == {
        "summary": "Draft the newest token once more.",
        "trained": False,
        "paper": "a paper",
        "ships_for": None,
    }
    model = ["--model", str(folders["llama"])]
    proof = line.invoke(app, ["prove", *model, "--methods", "again", "--limit", "2", "--max-new-tokens", "8", "--json"])
    assert proof.exit_code == 0 and json.loads(proof.stdout)["methods"]["again"]["identical"] == 2
    asked = ["bench", *model, "--methods", "again", "--limit", "1", "--max-new-tokens", "4", "--repeats", "1", "--json"]
    timed = line.invoke(app, [*asked, "--prompts", str(_prompts(tmp_path))])
    assert timed.exit_code == 0, timed.output


def _prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "hello"}) + "\n")
    return file


@pytest.mark.parametrize(
    ("code", "entry", "told"),
    [
        (
            "raise OSError('no disk')",
            "again = outside_package:Again",
            r"'again' of the package outside-package 1.5.*no d",
        ),
        (GOOD, "plain = outside_package:plain", "'plain'.*already"),
        (GOOD, "thing = outside_package:Thing", "'thing'.*inherits from foreword.Drafter"),
        (GOOD, "gone = outside_package:Gone", "'gone'.*AttributeError"),
    ],
)
def test_a_broken_package_is_named_and_the_rest_works(
    install: Callable[[str, str], None], code: str, entry: str, told: str
) -> None:
    install(code, entry)
    before = dict(table.METHODS)
    with pytest.warns(ForewordWarning, match=f"(?s){told}.*update or remove that package"):
        assert table.all_methods() == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.all_methods() == before  # said once


def test_packages_are_not_looked_up_before_they_are_needed(install: Callable[[str, str], None]) -> None:
    install("raise OSError('no disk')", "again = outside_package:Again")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.find("plain").summary
