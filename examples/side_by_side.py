"""The main job in one screen: the same prompt answered by plain decoding and by the best method, with the same tokens.

Run by `make demo`. The first run fetches the default model (about 90 MB).
"""

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel

import foreword
from foreword.methods import DEFAULT_METHOD

PROMPT = """Summarize: The lighthouse at Cape Arden was built in 1851 after three ships were lost on the reef in a single \
winter. The lighthouse was first lit by whale oil, and the keeper carried the oil up 132 steps every evening. In 1902 the \
lighthouse was given an electric lamp, and in 1968 the last keeper of the lighthouse left Cape Arden. Today the lighthouse \
is a museum, and the lamp of the lighthouse still turns every night."""
NEW_TOKENS = 128
TURNS = 3  # in turns, so that whatever else the machine does meanwhile falls on both


def main() -> None:
    console = Console()
    console.print(f"[dim]{PROMPT}[/]\n")
    with console.status("loading the default model"):
        llm = foreword.load(method="plain", slots=1)
    written: dict[str, list[foreword.Result]] = {"plain": [], DEFAULT_METHOD: []}
    for turn in range(TURNS):
        for method, results in written.items():
            with console.status(f"{method} writes, {turn + 1} of {TURNS}"):
                llm.use(method).generate("Hello", max_new_tokens=4)  # the first pass of a process is slow
                results.append(llm.generate(PROMPT, max_new_tokens=NEW_TOKENS))
    plain, fast = (_median(results) for results in written.values())
    console.print(Columns([_panel(plain), _panel(fast)], equal=True, expand=True))
    all_same = all(result.tokens == plain.tokens for results in written.values() for result in results)
    same = "the same tokens" if all_same else "DIFFERENT TOKENS: run `foreword prove`"
    ratio = fast.stats.tokens_per_second / plain.stats.tokens_per_second
    console.print(f"{same}, {ratio:.2f}x the speed of plain decoding (the median of {TURNS} runs each, in turns)")


def _median(results: list[foreword.Result]) -> foreword.Result:
    return sorted(results, key=lambda result: result.stats.tokens_per_second)[len(results) // 2]


def _panel(result: foreword.Result) -> Panel:
    stats = result.stats
    figures = f"{stats.tokens_per_round:.2f} tokens a round, {stats.tokens_per_second:.1f} tokens/s"
    return Panel(result.text, title=result.method, subtitle=figures)


if __name__ == "__main__":
    main()
