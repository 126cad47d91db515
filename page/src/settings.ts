// The settings: what goes into a request, the method of the server, and the API key.

import { byId, h } from "./dom.ts";
import { type Methods, Problem, type Server } from "./server.ts";

const KEY = "foreword-key";

const field = (id: string): HTMLInputElement => byId(id, HTMLInputElement);

export class Settings {
  readonly #panel = byId("settings", HTMLDetailsElement);
  readonly #system = byId("system", HTMLTextAreaElement);
  readonly #method = byId("method", HTMLSelectElement);
  readonly #hint = byId("method-hint", HTMLElement);
  method = "";

  /** `changed`: called when the server's method is another one. `failed`: shows a problem. */
  constructor(
    private readonly server: Server,
    private readonly changed: () => void,
    private readonly failed: (problem: unknown) => void,
  ) {
    this.#method.addEventListener("change", () => void this.#switch());
    this.#keepKey();
  }

  /** Return the fields of a request, apart from its messages. Refuse numbers that are none. */
  fields(): Record<string, unknown> {
    const numbers = { temperature: "temperature", top_p: "top-p", seed: "seed", max_tokens: "max-tokens" };
    const found: Record<string, unknown> = {};
    for (const [name, id] of Object.entries(numbers)) {
      const input = field(id);
      if (!input.checkValidity()) {
        this.open();
        input.reportValidity();
        throw new Problem(`${input.labels?.[0]?.textContent ?? id}: ${input.validationMessage}`);
      }
      if (input.value) found[name] = input.valueAsNumber;
    }
    return found;
  }

  /** Whether to draft. */
  get speculates(): boolean {
    return field("speculate").checked;
  }

  /** Return the messages before a conversation. */
  system(): { role: string; content: string }[] {
    const content = this.#system.value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  open(): void {
    this.#panel.open = true;
  }

  askForKey(): void {
    this.open();
    field("key").focus();
  }

  /** Ask the server for its methods. */
  async load(): Promise<void> {
    this.#show(await this.server.methods());
  }

  async #switch(): Promise<void> {
    this.#method.disabled = true;
    this.#hint.textContent = `Switching to ${this.#method.value} …`;
    try {
      this.#show(await this.server.useMethod(this.#method.value));
    } catch (problem) {
      this.failed(problem);
      await this.load().catch(this.failed);
    }
  }

  #show({ method, methods, switchable }: Methods): void {
    this.method = method;
    const names = methods.includes(method) ? methods : [method, ...methods];
    this.#method.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === method }, name)));
    this.#method.disabled = !switchable;
    this.#hint.textContent = switchable
      ? "Switches the method for everyone, while nothing runs."
      : "Fixed. To choose here, start the server with --switch-methods.";
    this.changed();
  }

  #keepKey(): void {
    const [key, keep] = [field("key"), field("keep-key")];
    const kept = sessionStorage.getItem(KEY);
    [key.value, keep.checked, this.server.key] = [kept ?? "", kept !== null, kept ?? ""];
    const store = (): void => {
      this.server.key = key.value.trim();
      if (keep.checked && this.server.key) sessionStorage.setItem(KEY, this.server.key);
      else sessionStorage.removeItem(KEY);
    };
    key.addEventListener("input", store);
    keep.addEventListener("change", store);
  }
}
