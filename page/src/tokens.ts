// The text of an answer, token by token. Tints tell rounds apart; what is known of a token is shown on hover, and to the
// keyboard: the text is one stop of the tab order, and arrow keys move inside it.

import type { Answer, Piece, Token } from "./answer.ts";
import { byId, h } from "./dom.ts";

const TINTS = 4;

const tooltip = byId("tooltip", HTMLElement);
const announcer = byId("announcer", HTMLElement);

export class TokenText {
  readonly element = h("div", { class: "tokens", tabindex: 0, role: "group" });
  readonly #spans: HTMLSpanElement[] = [];
  #current = -1;
  #answer: Answer | null = null;

  /** `select`: called with the number of the round whose token was chosen. */
  constructor(
    label: string,
    private readonly select: (round: number) => void,
  ) {
    this.element.setAttribute("aria-label", `${label}. Arrow keys move from token to token.`);
    this.element.addEventListener("pointerover", (event) => this.#hover(event.target));
    this.element.addEventListener("pointerleave", () => this.#leave());
    this.element.addEventListener("click", (event) => this.#choose(this.#spans.indexOf(event.target as HTMLSpanElement)));
    this.element.addEventListener("keydown", (event) => this.#press(event));
    this.element.addEventListener("blur", () => this.#leave());
  }

  /** Add what is new of an answer. */
  update(answer: Answer): void {
    if (this.#answer !== answer) this.#clear(answer);
    const fresh = answer.pieces.slice(this.#spans.length).map((piece) => h("span", { class: classOf(piece) }, piece.text));
    this.#spans.push(...fresh);
    this.element.append(...fresh);
  }

  /** Mark the tokens of a round; 0: none. */
  mark(round: number): void {
    const pieces = this.#answer?.pieces ?? [];
    this.#spans.forEach((span, index) => span.classList.toggle("marked", pieces[index]?.tokens.some((token) => token.round === round)));
  }

  #clear(answer: Answer): void {
    this.#answer = answer;
    this.#spans.length = 0;
    this.#current = -1;
    this.element.replaceChildren();
  }

  #hover(target: EventTarget | null): void {
    const index = this.#spans.indexOf(target as HTMLSpanElement);
    if (index >= 0) this.#show(index);
    else this.#leave();
  }

  #press(event: KeyboardEvent): void {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const last = this.#spans.length - 1;
    const to = { ArrowLeft: this.#current - 1, ArrowRight: this.#current + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.#leave();
    if (to === undefined || last < 0) return;
    event.preventDefault();
    event.stopPropagation();
    this.#choose(Math.min(Math.max(to, 0), last));
    announcer.textContent = tooltip.textContent;
  }

  #choose(index: number): void {
    const round = this.#answer?.pieces[index]?.tokens[0]?.round;
    if (round === undefined) return;
    this.#current = index;
    this.select(round);
    this.#show(index);
  }

  #show(index: number): void {
    const [piece, span] = [this.#answer?.pieces[index], this.#spans[index]];
    if (!piece || !span) return;
    this.#leave();
    span.classList.add("current");
    tooltip.replaceChildren(...piece.tokens.map((token) => h("p", {}, described(token))));
    tooltip.hidden = piece.tokens.length === 0;
    const [at, own] = [span.getBoundingClientRect(), tooltip.getBoundingClientRect()];
    const left = Math.min(Math.max(at.left, 8), innerWidth - own.width - 8);
    const above = at.top - own.height - 6;
    tooltip.style.left = `${left}px`;
    tooltip.style.top = `${above < 8 ? at.bottom + 6 : above}px`;
  }

  #leave(): void {
    tooltip.hidden = true;
    for (const span of this.element.querySelectorAll(".current")) span.classList.remove("current");
  }
}

function classOf(piece: Piece): string {
  const token = piece.tokens[0];
  return token ? `token tint${token.round % TINTS} ${token.origin}` : "token";
}

function described(token: Token): string {
  if (token.origin === "model") return `Round ${token.round} · the model’s own token`;
  const probability = token.probability === null ? "" : ` · probability ${token.probability.toFixed(2)}`;
  return `Round ${token.round} · ${token.origin} · depth ${token.depth}${probability}`;
}
