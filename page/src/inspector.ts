// The inspector: the rounds of one answer. It draws the draft of a round, and charts of all of them. While an answer grows it
// follows the newest round, until the user steps to another one.

import { type Answer, type Draft, type Round, depthsOf } from "./answer.ts";
import { barChart, lineChart, shareChart } from "./charts.ts";
import { byId, counted, decimals, h, oncePerFrame, percent, quote, s } from "./dom.ts";
import { DRAFTED, acceptanceByDepth, rates, sharesByOrigin, speed, tokensPerRound } from "./figures.ts";
import { NAMES, outline, tableOf, treeOf } from "./tree.ts";

const HOW_TO_READ =
  "An example. The top line is what was accepted; what was drafted besides hangs below it. Percentages are the model’s own " +
  "probabilities of a token after the one before it.";
const EXAMPLE: Draft = {
  nodes: [
    { token: 0, text: "Because", parent: 0, origin: "root", probability: null },
    { token: 1, text: " the", parent: 0, origin: "drafter", probability: 0.52 },
    { token: 2, text: " of", parent: 0, origin: "drafter", probability: 0.31 },
    { token: 3, text: " air", parent: 1, origin: "drafter", probability: 0.22 },
    { token: 4, text: " sky", parent: 1, origin: "lookup", probability: 0.44 },
    { token: 5, text: " is", parent: 4, origin: "lookup", probability: 0.71 },
    { token: 6, text: " blue", parent: 5, origin: "lookup", probability: 0.18 },
  ],
  accepted: [0, 1, 4, 5],
  next: { token: 7, text: " not" },
};
const KINDS = [...DRAFTED, "model"] as const;

export class Inspector {
  readonly #position = byId("round", HTMLElement);
  readonly #caption = byId("caption", HTMLElement);
  readonly #drawing = byId("drawing", HTMLElement);
  readonly #table = byId("table", HTMLDetailsElement);
  readonly #buttons = {
    first: byId("first", HTMLButtonElement),
    back: byId("back", HTMLButtonElement),
    forward: byId("forward", HTMLButtonElement),
    last: byId("last", HTMLButtonElement),
  };
  #answer: Answer | null = null;
  #marked: (round: number) => void = () => undefined;
  #number = 0; // of the round that is shown
  #follows = true;
  #drawn: Round | null = null;

  /** Draw what is new, at the next frame. */
  readonly refresh = oncePerFrame(() => this.#refresh());

  constructor() {
    this.#buttons.first.addEventListener("click", () => this.select(1));
    this.#buttons.back.addEventListener("click", () => this.#step(-1));
    this.#buttons.forward.addEventListener("click", () => this.#step(1));
    this.#buttons.last.addEventListener("click", () => this.select(Number.MAX_SAFE_INTEGER));
    this.#table.addEventListener("toggle", () => this.#fillTable());
    document.addEventListener("keydown", (event) => this.#press(event));
    this.#legend();
    this.#refresh();
  }

  /** Show an answer. `marked`: called with the number of the round that is shown. */
  show(answer: Answer, marked: (round: number) => void): void {
    if (this.#answer === answer) return;
    this.#marked(0);
    [this.#answer, this.#marked, this.#follows, this.#drawn] = [answer, marked, true, null];
    this.refresh();
  }

  clear(): void {
    this.#marked(0);
    [this.#answer, this.#marked, this.#follows, this.#drawn] = [null, () => undefined, true, null];
    this.refresh();
  }

  /** Show a round by its number. The last one is followed. */
  select(number: number): void {
    const last = this.#answer?.rounds.length ?? 0;
    this.#number = Math.max(Math.min(number, last), Math.min(1, last));
    this.#follows = this.#number === last;
    this.#refresh();
  }

  #step(by: number): void {
    this.select(this.#number + by);
  }

  #press(event: KeyboardEvent): void {
    const target = event.target as Element;
    if (event.altKey || event.ctrlKey || event.metaKey || target.closest("input, textarea, select, [role=tab]")) return;
    if (event.key === "ArrowLeft") this.#step(-1);
    else if (event.key === "ArrowRight") this.#step(1);
  }

  #refresh(): void {
    const rounds = this.#answer?.rounds ?? [];
    if (this.#follows) this.#number = rounds.length;
    const round = rounds[this.#number - 1] ?? null;
    this.#setButtons(rounds.length);
    this.#position.textContent = rounds.length ? `Round ${this.#number} of ${rounds.length}` : "No round yet";
    if (round !== this.#drawn || !round) this.#draw(round);
    byId("right", HTMLElement).classList.toggle("empty", !rounds.length);
    this.#charts();
  }

  /** Disable the buttons that lead nowhere. A disabled one would lose the focus of the keyboard, so it hands it on. */
  #setButtons(rounds: number): void {
    const { first, back, forward, last } = this.#buttons;
    const focused = document.activeElement;
    first.disabled = back.disabled = this.#number <= 1;
    forward.disabled = last.disabled = this.#number >= rounds;
    if ((focused === first || focused === back) && first.disabled) forward.focus();
    if ((focused === forward || focused === last) && last.disabled) back.focus();
  }

  #draw(round: Round | null): void {
    this.#drawn = round;
    const text = round ? captionOf(round) : HOW_TO_READ;
    const draft = round ? round.draft : EXAMPLE;
    this.#caption.textContent = text;
    this.#drawing.replaceChildren(...(draft ? [treeOf(draft, text)] : []));
    this.#table.hidden = !round?.draft;
    this.#drawing.scrollTo(0, 0);
    this.#fillTable();
    this.#marked(round?.number ?? 0);
  }

  #fillTable(): void {
    const draft = this.#table.open ? this.#drawn?.draft : null;
    byId("nodes", HTMLElement).replaceChildren(...(draft ? [tableOf(draft)] : []));
  }

  #legend(): void {
    const entry = (kind: (typeof KINDS)[number]): HTMLLIElement => {
      const sample = s("g", { class: `node ${kind} accepted` }, outline(kind, 1, 1, 20, 12));
      const mark = s("svg", { viewBox: "0 0 22 14", width: 22, height: 14, "aria-hidden": "true" }, sample);
      return h("li", {}, mark, NAMES[kind], h("b", { id: `share-${kind}` }));
    };
    byId("legend", HTMLUListElement).append(...KINDS.map(entry));
  }

  #charts(): void {
    const answer = this.#answer;
    const rounds = answer?.rounds ?? [];
    const shares = sharesByOrigin(rounds);
    for (const [origin, { accepted, drafted }] of shares) {
      byId(`share-${origin}`, HTMLElement).textContent = drafted ? `${accepted} of ${drafted}` : "";
    }
    const byKind = rounds.map(({ tokens }) => KINDS.map((kind) => tokens.filter((token) => token.origin === kind).length));
    byId("share-model", HTMLElement).textContent = rounds.length ? String(byKind.reduce((sum, counts) => sum + (counts.at(-1) ?? 0), 0)) : "";
    const [drafted, accepted] = [...shares.values()].reduce(([a, b], one) => [a + one.drafted, b + one.accepted], [0, 0]);
    const rate = answer && rounds.length ? decimals(speed(answer, performance.now())) : "–";
    const each = answer && rounds.length ? decimals(tokensPerRound(answer), 2) : "–";
    figure("rate", rate, lineChart([{ points: rates(rounds), kind: "all" }], `Tokens per second over time; ${rate} in all`));
    figure("each", each, barChart(byKind, KINDS, `Tokens of each round; ${each} on average`));
    const depths = acceptanceByDepth(rounds);
    const words = depths.map(({ accepted, drafted }, index) => `depth ${index + 1}: ${percent(accepted / drafted)}`);
    const share = drafted ? percent(accepted / drafted) : "–";
    figure("depth", share, shareChart(depths, `Rounds that accepted a token at each depth. ${words.join(", ")}`));
  }
}

function figure(name: string, value: string, chart: SVGSVGElement): void {
  byId(`${name}-value`, HTMLElement).textContent = value;
  byId(`${name}-chart`, HTMLElement).replaceChildren(chart);
}

function captionOf({ draft, tokens }: Round): string {
  if (!draft) return `${counted(tokens.length, "token")} decided; the server told nothing about this round.`;
  const own = `the model’s own ${quote(draft.next.text)}`;
  const drafted = draft.nodes.length - 1;
  if (!drafted) return `No draft: ${own}.`;
  const path = draft.accepted.slice(1).map((index) => draft.nodes[index]?.text ?? "");
  const depth = Math.max(...depthsOf(draft));
  const size = `${counted(drafted, "token")} drafted, ${depth} deep`;
  const found = path.length ? `${path.length} accepted, ${quote(path.join(""))}, and ${own}.` : `None accepted; ${own}.`;
  return `${size}. ${found}${endedHere(draft) ? " It was drafted too, but the output ended with it." : ""}`;
}

/** Whether the model's own token was drafted in the same place: the output reached its end before that could count. */
function endedHere({ nodes, accepted, next }: Draft): boolean {
  const last = accepted.at(-1) ?? 0;
  return nodes.some((node, index) => index > 0 && node.parent === last && node.token === next.token);
}
