"""The page in a browser: a real server of a tiny model in a thread, and one headless Chromium for all tests."""

import asyncio
import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import foreword
from foreword.api import LLM
from foreword.engine.engine import Engine
from foreword.serve.app import app_of
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.options import ServeOptions, digest
from foreword.serve.server import listen
from foreword.serve.service import Service

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with Playwright, of the extra `dev`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("the page is tested in Chromium, and there is none; install the package `chromium`", allow_module_level=True)

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
AXE = Path(__file__).parents[3] / "page/node_modules/axe-core/axe.min.js"
RULES: dict[str, Any] = {"light": {}, "dark": {"runOnly": ["color-contrast"]}}  # only colours depend on the theme
KEY, ROWS = "a-key", 8
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def llm(talking: Any, hf_tokenizer: Any, own_home: Any) -> Iterator[LLM]:
    """An LLM whose drafts do not depend on what this machine measures."""
    with foreword.wrap(talking("llama"), hf_tokenizer, "prompt_lookup", rows=ROWS, slots=2) as wrapped:
        yield wrapped


@dataclass
class Running:
    """A server. `service`: its parts."""

    service: Service
    address: str


@pytest.fixture(scope="module")
def servers(llm: LLM) -> Iterator[dict[str, Running]]:
    """Servers of one engine, in the loop of a thread: an open one, whose method can be switched, and one with a key."""
    found: dict[str, Running] = {}
    ready, done = threading.Event(), asyncio.Event()
    options = {"open": ServeOptions(switch_methods=True), "locked": ServeOptions(key_digests=(digest(KEY),))}

    async def run() -> None:
        async with AsyncLLM.of(llm) as engine:
            apps = {name: app_of(engine, one) for name, one in options.items()}
            sockets = {name: listen("127.0.0.1", 0) for name in apps}
            running = [uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None)) for app in apps.values()]
            tasks = [
                asyncio.create_task(server.serve([port])) for server, port in zip(running, sockets.values(), strict=True)
            ]
            for name, app in apps.items():
                found[name] = Running(app.state.service, f"http://127.0.0.1:{sockets[name].getsockname()[1]}")
            ready.set()
            await done.wait()
            for server in running:
                server.should_exit = server.force_exit = True
            await asyncio.gather(*tasks)
            for port in sockets.values():
                port.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(30)
    yield found
    loop.call_soon_threadsafe(done.set)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)


@dataclass
class Visit:
    """A fresh page, and what it must not do: log errors, or ask another origin."""

    page: Any
    address: str
    complaints: list[str] = field(default_factory=list)
    origins: set[str] = field(default_factory=set)

    def begin(self) -> None:
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.origins.add("/".join(request.url.split("/")[:3])))
        self.page.goto(self.address)

    def check(self) -> None:
        """A status that is an error is logged by the browser itself."""
        assert [text for text in self.complaints if not text.startswith("Failed to load resource")] == []
        assert self.origins <= {self.address}

    def send(self, text: str = "hello", tokens: int = 24, waits: bool = True) -> None:
        self.page.locator("#max-tokens").evaluate("(field, value) => { field.value = value }", str(tokens))
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        if waits:
            self.page.wait_for_selector("#stop:disabled")
            self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def problem(self) -> str:
        self.page.wait_for_selector("#problem:not(:empty)")
        return str(self.page.inner_text("#problem"))

    def texts(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_text_contents())


@pytest.fixture
def visit(browser: Any, servers: dict[str, Running]) -> Iterator[Callable[..., Visit]]:
    """Opens the page: visit(), or visit("locked", color_scheme="dark")."""
    visits: list[Visit] = []

    def begin(name: str = "open", **options: Any) -> Visit:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        visits.append(Visit(context.new_page(), servers[name].address))
        visits[-1].begin()
        if name == "open":
            visits[-1].page.wait_for_selector("#served-method:not(:empty)")
        return visits[-1]

    yield begin
    for one in visits:
        one.page.context.close()
    for one in visits:
        one.check()


@pytest.fixture(scope="module")
def prompt(llm: LLM) -> str:
    """A prompt whose answer repeats itself, so that drafts of the lookup are accepted."""
    for letter in "abcdefghijklmnopqrstuvwxyz":
        result = llm.generate([{"role": "user", "content": letter * 3}], max_new_tokens=24, temperature=0)
        if result.stats.rounds < len(result.tokens) - 3 and len(result.tokens) == 24:
            return letter * 3
    raise AssertionError("no answer repeats itself")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Engine.advance
    monkeypatch.setattr(Engine, "advance", lambda engine, rounds=1: time.sleep(0.02) or advance(engine, rounds))


def post(address: str, body: Any) -> str:
    """Return the answer to a chat request as the server sends it."""
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def posted(address: str, body: Any) -> Any:
    return json.loads(post(address, body))


def traced(address: str, content: str, tokens: int = 24) -> tuple[str, list[Any]]:
    """Return the text of an answer and its rounds, as the server tells them."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0}
    answer = post(address, {**body, "stream": True, "trace_rounds": True})
    chunks = [json.loads(line[6:]) for line in answer.split("\n") if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    return text, [chunk["foreword"]["round"] for chunk in chunks if "round" in chunk.get("foreword", {})]


# The chat -----------------------------------------------------------------------------------------------------------------


def test_an_answer_is_that_of_the_server_and_its_trees_are_those_of_the_trace(
    visit: Any, servers: dict[str, Running], prompt: str
) -> None:
    text, rounds = traced(servers["open"].address, prompt)
    one = visit()
    one.send(prompt)
    assert one.page.locator(".tokens").text_content() == text
    assert any(len(draft["nodes"]) > 2 for draft in rounds) and any(len(draft["accepted"]) > 1 for draft in rounds)
    one.page.click("#first")
    for number, draft in enumerate(rounds, 1):
        assert one.page.inner_text("#round") == f"Round {number} of {len(rounds)}"
        nodes = one.page.locator("#drawing .node")
        kinds = [(name or "").split() for name in nodes.evaluate_all("all => all.map(node => node.getAttribute('class'))")]
        expected = ["root", *(node["origin"] for node in draft["nodes"][1:]), "model"]
        assert sorted(kind[1] for kind in kinds) == sorted(expected)
        assert sum(kind[2] == "accepted" for kind in kinds) == len(draft["accepted"]) + 1
        shapes = [title.split("”")[0].removeprefix("“") for title in one.texts("#drawing .node title")]
        assert sorted(shapes) == sorted([*(node["text"] for node in draft["nodes"]), draft["next"]["text"]])
        if number < len(rounds):
            one.page.click("#forward")
    assert one.page.locator("#forward").is_disabled() and not one.page.locator("#back").is_disabled()


def test_figures_and_table_are_those_of_the_trace(visit: Any, servers: dict[str, Running], prompt: str) -> None:
    _, rounds = traced(servers["open"].address, prompt)
    one = visit()
    one.send(prompt)
    nodes = [(node, index in draft["accepted"]) for draft in rounds for index, node in enumerate(draft["nodes"])]
    lookups = [taken for node, taken in nodes if node["origin"] == "lookup"]
    assert one.page.inner_text("#share-lookup") == f"{sum(lookups)} of {len(lookups)}"
    assert one.page.inner_text("#each-value") == f"{24 / len(rounds):.2f}"
    assert f"24 tokens in {len(rounds)} rounds" in one.page.inner_text(".note")
    assert one.page.locator("#each-chart rect").count() >= len(rounds)
    one.page.click("#table summary")
    one.page.click("#first")
    rows = one.page.locator("#nodes tbody tr")
    assert rows.count() == len(rounds[0]["nodes"]) - 1


def test_arrow_keys_step_through_rounds_and_tokens(visit: Any) -> None:
    one = visit()
    one.send()
    one.page.focus("#drawing")
    last = one.page.inner_text("#round")
    one.page.keyboard.press("ArrowLeft")
    assert one.page.inner_text("#round") != last
    one.page.keyboard.press("ArrowRight")
    assert one.page.inner_text("#round") == last
    one.page.focus(".tokens")
    one.page.keyboard.press("Home")
    assert one.page.inner_text("#tooltip").startswith("Round 1 ·") and one.page.inner_text("#round").startswith("Round 1 of")
    assert one.page.text_content("#announcer").startswith("Round 1 ·")
    assert one.page.locator(".token.marked").count() >= 1
    one.page.keyboard.press("End")
    assert one.page.inner_text("#round") == last
    one.page.keyboard.press("Escape")
    assert one.page.locator("#tooltip").is_hidden()
    one.page.focus("#prompt")
    one.page.keyboard.press("ArrowLeft")
    assert one.page.inner_text("#round") == last


def test_tokens_tell_their_round_and_tints_can_be_turned_off(visit: Any, prompt: str) -> None:
    one = visit()
    one.send(prompt)
    token = one.page.locator(".token.lookup").first
    token.hover()
    assert "lookup · depth" in one.page.inner_text("#tooltip") and "probability" in one.page.inner_text("#tooltip")
    tint = "getComputedStyle(document.querySelector('.token.lookup')).backgroundColor"
    assert one.page.evaluate(tint) != "rgba(0, 0, 0, 0)"
    one.page.click("#tints")
    one.page.wait_for_timeout(200)
    assert one.page.evaluate(tint) == "rgba(0, 0, 0, 0)"
    assert one.page.get_attribute("#tints", "aria-pressed") == "false"


def test_a_conversation_goes_on_and_can_begin_anew(visit: Any) -> None:
    one = visit()
    bodies: list[Any] = []
    one.page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    one.page.click("#settings summary")
    one.page.fill("#system", "be brief")
    one.page.fill("#seed", "7")
    one.page.fill("#top-p", "0.9")
    one.send("one", 5)
    one.page.uncheck("#speculate")
    one.send("two", 5)
    answers = one.texts(".tokens")
    assert bodies[1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "two"},
    ]
    assert bodies[1]["seed"] == 7 and bodies[1]["top_p"] == 0.9 and bodies[1]["max_tokens"] == 5
    assert "speculate" not in bodies[0] and bodies[1]["speculate"] is False
    one.page.click("#new")
    assert one.page.locator("#conversation li").count() == 0 and one.page.locator("#welcome").is_visible()


def test_text_is_divided_among_its_tokens(visit: Any) -> None:
    """Also where two tokens make a character, and where a token's text is held back: in two rounds each."""
    one = visit()

    def told(number: int, spelled: str, content: str) -> str:
        root = {"token": 0, "text": "", "parent": 0, "origin": "root", "probability": None}
        draft = {"nodes": [root], "accepted": [0], "next": {"token": number, "text": spelled}}
        choice = {"delta": {"content": content}, "finish_reason": None, "token_ids": [number]}
        return f"data: {json.dumps({'choices': [choice], 'foreword': {'tokens': [number], 'round': draft}})}\n\n"

    rounds = [told(1, "�", ""), told(2, "�", "é"), told(3, " ab", " a"), told(4, "c", "bc"), told(5, "", "")]
    body = "".join(rounds) + "data: [DONE]\n\n"
    one.page.route("**/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    one.send()
    assert one.texts(".token") == ["é", " ab", "c"]
    one.page.locator(".token").first.hover()
    assert one.texts("#tooltip p") == [f"Round {number} · the model’s own token" for number in (1, 2)]


@pytest.mark.usefixtures("slow")
def test_stopping_ends_the_request(visit: Any, servers: dict[str, Running]) -> None:
    one = visit()
    one.page.click("#settings summary")
    one.page.uncheck("#speculate")
    one.send(tokens=400, waits=False)
    one.page.wait_for_selector(".token")
    one.page.click("#stop")
    one.page.wait_for_selector("#stop:disabled")
    assert "stopped" in one.page.wait_for_selector(".note:has-text('stopped')").inner_text()
    until = time.monotonic() + 10
    while servers["open"].service.admission.inside and time.monotonic() < until:
        time.sleep(0.01)
    assert servers["open"].service.admission.inside == 0


# The race -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["in turns", "together"])
def test_a_race_proves_that_both_wrote_the_same(visit: Any, servers: dict[str, Running], order: str, prompt: str) -> None:
    one = visit()
    bodies: list[Any] = []
    one.page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    one.page.click("#race-tab")
    assert one.page.locator("#order input").first.is_checked()
    if order == "together":
        one.page.check("#together")
    one.page.locator("#temperature").evaluate("field => { field.value = '1' }")
    one.send(prompt)
    plain, drafted = bodies
    assert plain.pop("speculate") is False and plain.pop("cache_salt") != drafted.pop("cache_salt") and plain == drafted
    whole = posted(servers["open"].address, {**plain, "stream": False})
    assert one.texts(".lane .tokens") == [whole["choices"][0]["message"]["content"]] * 2
    assert one.page.inner_text(".verdict") == f"Identical: {whole['usage']['completion_tokens']} tokens."
    result = one.page.inner_text("#result")
    assert "times as fast" in result and ("no fair timing" in result) == (order == "together")
    assert one.page.locator("#race-lines .line").count() == 2


def test_a_race_shows_the_first_divergence(visit: Any) -> None:
    one = visit()

    def lie(route: Any) -> None:
        if "speculate" not in route.request.post_data_json:
            return route.continue_()
        lines = route.fetch().text().split("\n\n")
        at = [index for index, line in enumerate(lines) if '"token_ids"' in line][3]
        chunk = json.loads(lines[at].removeprefix("data: "))
        chunk["choices"][0]["token_ids"] = [99]
        route.fulfill(
            content_type="text/event-stream", body="\n\n".join([*lines[:at], f"data: {json.dumps(chunk)}", *lines[at + 1 :]])
        )

    one.page.route("**/v1/chat/completions", lie)
    one.page.click("#race-tab")
    one.send()
    assert one.page.inner_text(".verdict") == "They diverge at token 4."
    assert "plain wrote" in one.page.inner_text("#result") and "(99)" in one.page.inner_text("#result")


# The server's options, and its errors -------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_only_on_demand(visit: Any) -> None:
    one = visit("locked")
    assert one.problem() == "This server needs an API key. Enter it in the settings."
    assert one.page.evaluate("document.activeElement.id") == "key"
    stored = "[sessionStorage.length, Object.keys(localStorage).length]"
    one.page.fill("#key", "wrong")
    one.page.press("#key", "Tab")
    one.page.wait_for_selector("#problem:has-text('does not know this API key')")
    one.page.fill("#key", KEY)
    one.page.press("#key", "Tab")
    one.page.wait_for_selector("#served-method:not(:empty)")
    assert one.page.inner_text("#problem") == "" and one.page.evaluate(stored) == [0, 0]
    one.send(tokens=5)
    assert one.page.locator(".token").count() >= 1
    assert "--switch-methods" in one.page.inner_text("#method-hint") and one.page.locator("#method").is_disabled()
    one.page.check("#keep-key")
    assert one.page.evaluate(stored) == [1, 0]
    one.page.reload()
    one.page.wait_for_selector("#served-method:not(:empty)")
    one.page.click("#settings summary")
    one.page.uncheck("#keep-key")
    assert one.page.evaluate(stored) == [0, 0]


def test_the_method_is_switched(visit: Any, llm: LLM) -> None:
    one = visit()
    before = one.page.inner_text("#served-method")
    one.page.click("#settings summary")
    try:
        one.page.select_option("#method", "token_recycling")
        one.page.wait_for_selector("#served-method:text-is('token_recycling')")
        one.send()
        assert one.page.inner_text(".note").startswith("token_recycling · 24 tokens")
        one.page.select_option("#method", "medusa")
        assert "refused the request" in one.problem() and "medusa" in one.problem()
        one.page.wait_for_selector("#method:enabled")
        assert one.page.input_value("#method") == "token_recycling"
    finally:
        one.page.select_option("#method", before)
        one.page.wait_for_selector(f"#served-method:text-is('{before}')")
        llm.use(before, rows=ROWS)


def test_errors_are_shown_in_plain_words(visit: Any, servers: dict[str, Running]) -> None:
    one, admission = visit(), servers["open"].service.admission
    with admission.enter(object(), 2 + ServeOptions.max_queued):  # type: ignore[arg-type]
        one.send("first")
        assert one.problem().startswith("The server is busy, and its queue is full. Try again in ")
    assert one.page.input_value("#prompt") == "first"  # nothing is lost
    assert one.page.locator("#conversation li").count() == 0
    admission._draining = True
    try:
        one.send("second")
        assert one.problem() == "The server cannot answer now: the server is stopping; ask another one. Try again in 5 s."
    finally:
        admission._draining = False
    one.page.context.set_offline(True)
    one.send("third")
    assert one.problem() == "The server cannot be reached. Is it still running?"
    one.page.context.set_offline(False)
    one.page.locator("#temperature").evaluate("field => { field.value = '-1' }")
    one.send("fourth")
    assert one.problem().startswith("Temperature: ")
    one.page.locator("#temperature").evaluate("field => { field.value = '0' }")
    one.send("x" * 3000)
    assert one.problem().startswith("The server refused the request: ")


def test_what_a_model_or_a_user_writes_is_text(visit: Any) -> None:
    """A model cannot be made to write this at will, so the answer of the server is replaced."""
    one = visit()
    nodes = [
        {"token": 1, "text": HOSTILE, "parent": 0, "origin": "root", "probability": 1},
        {"token": 2, "text": HOSTILE, "parent": 0, "origin": "lookup", "probability": 0.5},
    ]
    draft = {"nodes": nodes, "accepted": [0, 1], "next": {"token": 2, "text": HOSTILE}}
    choice = {"delta": {"content": HOSTILE * 2}, "finish_reason": None, "token_ids": [2, 2]}
    chunk = {"choices": [choice], "foreword": {"tokens": [2, 2], "round": draft}}
    body = f"data: {json.dumps(chunk)}\n\ndata: {json.dumps({'error': {'message': HOSTILE}})}\n\n"
    one.page.route("**/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    one.send(HOSTILE)
    one.page.click("#table summary")
    one.page.locator(".token").first.hover()
    assert one.texts(".user p") == [HOSTILE] and one.texts(".token") == [HOSTILE] * 2
    assert HOSTILE in one.problem() and HOSTILE in one.page.inner_text("#caption")
    assert one.page.locator("img, #left script").count() == 0 and one.page.title() == "Foreword"


# For everyone -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_passes_axe(visit: Any, scheme: str, prompt: str) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is missing: `npm ci` in page/ installs it")
    one = visit(color_scheme=scheme, bypass_csp=True)
    one.page.click("#settings summary")
    one.send(prompt)
    one.page.click("#table summary")
    one.page.evaluate(AXE.read_text(encoding="utf-8"))
    for view in ("chat", "race"):
        one.page.click(f"#{view}-tab")
        if view == "race":
            one.send(prompt, 12)
        one.page.wait_for_timeout(200)  # transitions of colours
        found = one.page.evaluate("rules => axe.run(document, rules)", RULES[scheme])
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]] == []
        assert found["passes"]


def test_every_control_has_a_name_and_only_whole_answers_are_announced(visit: Any) -> None:
    one = visit()
    one.page.click("#settings summary")
    names = one.page.locator("button, input, select, textarea").evaluate_all(
        "all => all.filter(one => !(one.getAttribute('aria-label') || one.labels?.length || one.textContent.trim()))"
        ".map(one => one.id)"
    )
    assert names == []
    one.page.evaluate(
        "said = []; new MutationObserver(() => said.push(announcer.textContent)).observe(announcer, {childList: true})"
    )
    one.send()
    assert one.page.evaluate("said") == [f"Answer: {one.page.locator('.tokens').text_content()}"]
    live = one.page.locator("[aria-live], [role=alert], [role=status], [role=log]").evaluate_all(
        "all => all.map(one => one.id)"
    )
    assert sorted(live) == ["announcer", "problem"]
    one.page.fill("#prompt", "hello")
    one.page.focus("#send")
    one.page.keyboard.press("Enter")
    one.page.wait_for_selector("#stop:disabled")
    assert one.page.evaluate("document.activeElement.id") == "prompt"  # buttons hand the focus on when they are disabled
    one.page.focus("#first")
    one.page.keyboard.press("Enter")
    assert one.page.evaluate("document.activeElement.id") == "forward"
    one.page.focus("#chat-tab")
    one.page.keyboard.press("ArrowRight")
    assert one.page.evaluate("document.activeElement.id") == "race-tab" and one.page.locator("#race").is_visible()
    assert one.page.get_attribute("#race-tab", "aria-selected") == "true" and one.page.locator("#chat").is_hidden()


def test_the_theme_follows_the_system_until_it_is_chosen(visit: Any) -> None:
    one = visit(color_scheme="dark", reduced_motion="reduce")
    back = "getComputedStyle(document.documentElement).backgroundColor"
    dark = one.page.evaluate(back)
    one.page.click("#theme")
    light = one.page.evaluate(back)
    assert light != dark and one.page.get_attribute("#theme", "aria-label") == "Use the dark theme"
    one.page.reload()
    assert one.page.evaluate(back) == light
    assert one.page.evaluate("getComputedStyle(theme).transitionDuration") == "0s"


def test_a_narrow_screen_scrolls_in_one_direction_only(visit: Any, prompt: str) -> None:
    one = visit(color_scheme="light")
    one.page.set_viewport_size({"width": 360, "height": 740})
    one.send(prompt)
    for view in ("chat", "race"):
        one.page.click(f"#{view}-tab")
        if view == "race":
            one.send(prompt, 12)
        assert one.page.evaluate("document.documentElement.scrollWidth") == 360
        assert one.page.locator("#send").is_visible() and one.page.locator("#drawing").is_visible()
