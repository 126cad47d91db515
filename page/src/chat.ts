// The chat: a conversation, whose answers are written token by token.

import { Answer } from "./answer.ts";
import { ask } from "./asking.ts";
import { byId, counted, decimals, h, oncePerFrame } from "./dom.ts";
import { speed, tokenCount, tokensPerRound } from "./figures.ts";
import type { Inspector } from "./inspector.ts";
import type { Server } from "./server.ts";
import type { Settings } from "./settings.ts";
import { TokenText } from "./tokens.ts";

interface Message {
  role: string;
  content: string;
}

export class Chat {
  readonly #list = byId("conversation", HTMLOListElement);
  readonly #pane = byId("left", HTMLElement);
  readonly #said: Message[] = [];

  constructor(
    private readonly server: Server,
    private readonly settings: Settings,
    private readonly inspector: Inspector,
  ) {}

  /** Send a message, and show the answer as it comes. */
  async send(prompt: string, signal: AbortSignal): Promise<void> {
    const fields = this.settings.fields();
    if (!this.settings.speculates) fields["speculate"] = false;
    const said = [...this.#said, { role: "user", content: prompt }];
    const answer = new Answer();
    const place = this.#place(prompt, answer, this.settings.speculates ? this.settings.method : "plain");
    byId("welcome", HTMLElement).hidden = true;
    try {
      await ask(this.server, { messages: [...this.settings.system(), ...said], ...fields }, answer, signal, place.grown);
    } finally {
      place.grown();
      if (answer.text) this.#said.splice(0, Infinity, ...said, { role: "assistant", content: answer.text });
      else if (answer.state === "failed") place.remove();
      byId("welcome", HTMLElement).hidden = this.#list.children.length > 0;
    }
    byId("announcer", HTMLElement).textContent = `Answer: ${answer.text}`;
  }

  clear(): void {
    this.#said.length = 0;
    this.#list.replaceChildren();
    this.inspector.clear();
    byId("welcome", HTMLElement).hidden = false;
  }

  /** Add a prompt and its answer to the page. */
  #place(prompt: string, answer: Answer, method: string): { grown: () => void; remove: () => void } {
    const show = (): void => this.inspector.show(answer, (round) => text.mark(round));
    const text = new TokenText("Answer", (round) => {
      show();
      this.inspector.select(round);
    });
    const note = h("p", { class: "note" }, "…");
    const asked = h("li", { class: "user" }, h("h2", { class: "unseen" }, "You"), h("p", {}, prompt));
    const given = h("li", { class: "model" }, h("h2", { class: "unseen" }, "Model"), text.element, note);
    this.#list.append(asked, given);
    show();
    this.#pane.scrollTop = this.#pane.scrollHeight;
    const grown = oncePerFrame(() => {
      const isAtEnd = this.#pane.scrollHeight - this.#pane.scrollTop - this.#pane.clientHeight < 60;
      text.update(answer);
      note.textContent = noteOf(answer, method);
      this.inspector.refresh();
      if (isAtEnd) this.#pane.scrollTop = this.#pane.scrollHeight;
    });
    return { grown, remove: () => (asked.remove(), given.remove()) };
  }
}

function noteOf(answer: Answer, method: string): string {
  if (!answer.rounds.length) return "…";
  const count = `${counted(tokenCount(answer), "token")} in ${counted(answer.rounds.length, "round")}`;
  const each = `${decimals(tokensPerRound(answer), 2)} per round`;
  const rate = `${decimals(speed(answer, performance.now()))} tokens/s`;
  const ends: Record<string, string> = { stopped: " · stopped", failed: " · broke off" };
  const end = ends[answer.state] ?? (answer.reason === "length" ? " · reached the limit" : "");
  return `${method} · ${count}, ${each} · ${rate}${end}`;
}
