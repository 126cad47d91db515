"""Speculative decoding on one screen: plain decoding and the best method answer three prompts with the same tokens.

Run by `make demo`. The first run fetches the default model (about 90 MB). The speed-up depends on the output, so
there are three kinds of prompts: one whose answer copies from it, an open question, and code. `--turns` and `--tokens` make
it shorter.
"""

import argparse
import logging
from statistics import median

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

import foreword
from foreword.methods import DEFAULT_METHOD

PROMPTS = {
    "copying": """Summarize: The lighthouse at Cape Arden was built in 1851 after three ships were lost on the reef in a \
single winter. The lighthouse was first lit by whale oil, and the keeper carried the oil up 132 steps every evening. In \
1902 the lighthouse was given an electric lamp, and in 1968 the last keeper of the lighthouse left Cape Arden. Today the \
lighthouse is a museum, and the lamp of the lighthouse still turns every night.""",
    "open question": "Explain in two sentences why the sky is blue.",
    "code": "Write a Python function that counts the vowels in a string, with a docstring.",
}

Runs = list[foreword.Result]


def main(turns: int, tokens: int) -> None:
    logging.disable(logging.WARNING)  # what libraries say of parts that they do without
    console = Console()
    with console.status("loading the default model"):
        llm = foreword.load(method="plain", slots=1)
    plain = {kind: Runs() for kind in PROMPTS}
    fast = {kind: Runs() for kind in PROMPTS}
    for turn in range(turns):  # the methods take turns, so that other load on the machine affects both
        for method, runs in (("plain", plain), (DEFAULT_METHOD, fast)):
            with console.status(f"{method} generates, {turn + 1} of {turns}"):
                llm.use(method).generate("Hello", max_new_tokens=4)  # the first pass of a process is slow
                for kind, prompt in PROMPTS.items():
                    runs[kind].append(llm.generate(prompt, max_new_tokens=tokens))
    for kind, prompt in PROMPTS.items():
        console.print(f"\n[bold]{kind}[/]  [dim]{prompt}[/]")
        console.print(_side_by_side(plain[kind][0], fast[kind][0]))
    console.print(_figures(plain, fast))
    same = all(run.tokens == plain[kind][0].tokens for kind in PROMPTS for run in plain[kind] + fast[kind])
    verdict = "the same tokens" if same else "DIFFERENT TOKENS: run `foreword prove`"
    over_all = sum(map(_seconds, plain.values())) / sum(map(_seconds, fast.values()))
    console.print(
        f"{verdict}, {over_all:.2f}x the speed of plain decoding over the three (medians of {turns} runs, in turns)"
    )


def _seconds(runs: Runs) -> float:
    return median(run.stats.decode_s for run in runs)


def _side_by_side(*results: foreword.Result) -> Table:
    grid = Table.grid(expand=True)
    for _ in results:
        grid.add_column(ratio=1)
    grid.add_row(*(Panel(result.text, title=result.method) for result in results))
    return grid


def _figures(plain: dict[str, Runs], fast: dict[str, Runs]) -> Table:
    table = Table("prompt", "plain tokens/s", "tokens/s", "speed-up", "tokens per round")
    for kind, runs in fast.items():
        before, after = _seconds(plain[kind]), _seconds(runs)
        tokens, rounds = runs[0].stats.new_tokens, runs[0].stats.tokens_per_round
        table.add_row(kind, f"{tokens / before:.1f}", f"{tokens / after:.1f}", f"{before / after:.2f}x", f"{rounds:.2f}")
    return table


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--turns", type=int, default=3, help="how often both answer all prompts (default: 3)")
    options.add_argument("--tokens", type=int, default=64, help="new tokens of each answer (default: 64)")
    main(**vars(options.parse_args()))
