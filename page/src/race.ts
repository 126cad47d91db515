// The race: plain decoding next to the server's method, for one prompt and seed, and the proof that both wrote the same.

import { Answer } from "./answer.ts";
import { ask } from "./asking.ts";
import { lineChart } from "./charts.ts";
import { byId, counted, decimals, h, oncePerFrame, quote } from "./dom.ts";
import { progress, speed, tokensPerRound } from "./figures.ts";
import type { Inspector } from "./inspector.ts";
import type { Server } from "./server.ts";
import type { Settings } from "./settings.ts";
import { TokenText } from "./tokens.ts";

const SEEDS = 2 ** 31;
const CHART_WIDTH = 480;

export class Race {
  readonly #lanes = byId("lanes", HTMLElement);
  readonly #result = byId("result", HTMLElement);
  readonly #chart = byId("race-chart", HTMLElement);

  constructor(
    private readonly server: Server,
    private readonly settings: Settings,
    private readonly inspector: Inspector,
  ) {}

  /** Write the answer to a prompt twice, and compare. */
  async run(prompt: string, signal: AbortSignal): Promise<void> {
    const seed = Math.floor(Math.random() * SEEDS);
    const messages = [...this.settings.system(), { role: "user", content: prompt }];
    const body = { seed, messages, ...this.settings.fields() };
    const together = byId("together", HTMLInputElement).checked;
    const lanes = [new Lane("plain", "plain"), new Lane(this.settings.method, "drafted")] as const;
    const [plain, drafted] = lanes;
    this.#begin(prompt, lanes);
    const refresh = oncePerFrame(() => {
      lanes.forEach((lane) => lane.refresh());
      this.#draw(plain, drafted);
      this.inspector.refresh();
      if (lanes.some((lane) => lane.answer.state === "running")) refresh();
    });
    // Each lane reads the prompt itself: what one cached would help the other.
    const run = (lane: Lane, more: object): Promise<void> =>
      ask(this.server, { ...body, ...more, cache_salt: crypto.getRandomValues(new Uint32Array(2)).join("-") }, lane.answer, signal, refresh);
    const runs = [() => run(plain, { speculate: false }), () => run(drafted, {})];
    refresh();
    if (together) {
      const ended = await Promise.allSettled(runs.map((begin) => begin()));
      const failed = ended.find((one) => one.status === "rejected");
      if (failed) throw failed.reason;
    } else {
      for (const begin of runs) if (!signal.aborted) await begin();
    }
    refresh();
    this.#judge(plain, drafted, together);
  }

  #begin(prompt: string, lanes: readonly Lane[]): void {
    byId("race-welcome", HTMLElement).hidden = true;
    byId("race-prompt", HTMLElement).textContent = prompt;
    this.#result.replaceChildren();
    this.#lanes.replaceChildren(...lanes.map((lane) => lane.element));
    for (const lane of lanes) lane.chosen = (round) => this.#inspect(lane, round);
    const drafted = lanes[1];
    if (drafted) this.#inspect(drafted);
  }

  #inspect(lane: Lane, round?: number): void {
    this.inspector.show(lane.answer, (number) => lane.text.mark(number));
    if (round !== undefined) this.inspector.select(round);
  }

  #draw(plain: Lane, drafted: Lane): void {
    const lines = [plain, drafted].map(({ answer, kind }) => ({ points: progress(answer.rounds), kind }));
    this.#chart.hidden = false;
    byId("race-lines-title", HTMLElement).textContent = `Tokens over time: ${drafted.name}, and plain dashed`;
    byId("race-lines", HTMLElement).replaceChildren(lineChart(lines, `Tokens over time: plain, and ${drafted.name}`, CHART_WIDTH));
  }

  #judge(plain: Lane, drafted: Lane, together: boolean): void {
    const verdict = verdictOf(plain, drafted);
    const said = h("p", { class: verdict.good ? "verdict good" : "verdict" }, verdict.text);
    this.#result.replaceChildren(said, ...verdict.more.map((text) => h("p", {}, text)));
    if (plain.answer.state === "complete" && drafted.answer.state === "complete") {
      this.#result.append(h("p", {}, timing(plain.answer, drafted, together)));
    }
    byId("announcer", HTMLElement).textContent = this.#result.textContent;
  }
}

class Lane {
  readonly answer = new Answer();
  readonly #figures = h("p", { class: "figures" });
  readonly text: TokenText;
  readonly element: HTMLElement;
  chosen: (round: number) => void = () => undefined;

  /** `kind`: the class of its line in the chart. */
  constructor(
    readonly name: string,
    readonly kind: string,
  ) {
    this.text = new TokenText(`Answer of ${name}`, (round) => this.chosen(round));
    this.element = h("section", { class: "lane" }, h("h2", { class: kind }, name), this.#figures, this.text.element);
    this.refresh();
  }

  refresh(): void {
    const now = performance.now();
    this.text.update(this.answer);
    const cells: [string, string][] = [
      ["elapsed", `${decimals(this.answer.elapsed(now) / 1000)} s`],
      ["tokens/s", decimals(speed(this.answer, now))],
      ["per round", decimals(tokensPerRound(this.answer), 2)],
    ];
    this.#figures.replaceChildren(...cells.map(([name, value]) => h("span", {}, h("b", {}, value), ` ${name}`)));
  }
}

interface Verdict {
  good: boolean;
  text: string;
  more: string[];
}

/** Compare the token ids of two answers. */
function verdictOf(plain: Lane, drafted: Lane): Verdict {
  const [a, b] = [plain.answer.ids, drafted.answer.ids];
  const both = Math.min(a.length, b.length);
  const isWhole = plain.answer.state === "complete" && drafted.answer.state === "complete";
  let same = 0;
  while (same < both && a[same] === b[same]) same++;
  if (same < both || (isWhole && a.length !== b.length)) {
    const words = [plain, drafted].map((lane) => `${lane.name} wrote ${quoted(lane.answer, same)}`);
    const why = "In half precision this can happen at a near-tie; the page “Proofs” of the documentation tells how to judge it.";
    return { good: false, text: `They diverge at token ${same + 1}.`, more: [`${words.join(", ")}.`, why] };
  }
  if (!isWhole) return { good: true, text: same ? `Stopped. Identical so far: ${counted(same, "token")}.` : "Stopped.", more: [] };
  return { good: true, text: `Identical: ${counted(same, "token")}.`, more: [] };
}

function quoted(answer: Answer, index: number): string {
  const token = answer.rounds.flatMap((round) => round.tokens)[index];
  return token ? `${quote(token.text)} (${answer.ids[index]})` : "nothing more";
}

function timing(plain: Answer, drafted: Lane, together: boolean): string {
  const [a, b] = [plain.elapsed(0) / 1000, drafted.answer.elapsed(0) / 1000];
  const found = `${drafted.name} took ${decimals(b)} s, plain ${decimals(a)} s, the prompt included: ${decimals(a / b, 2)} times as fast.`;
  const caveat = together
    ? "Both shared the machine and the batch, so this is no fair timing; let them run one after the other for that."
    : "This is one run; other requests at the same time would slow it.";
  return `${found} ${caveat}`;
}
