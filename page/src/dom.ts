// Elements. Whatever comes from a model, a user or a server becomes a text node: nothing here parses HTML.

type Attributes = Record<string, string | number | boolean>;
type Child = Node | string;

/** Make an HTML element. An attribute that is false is left out, one that is true is empty. */
export function h<K extends keyof HTMLElementTagNameMap>(
  name: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return filled(document.createElement(name), attributes, children);
}

/** Make an SVG element. */
export function s<K extends keyof SVGElementTagNameMap>(
  name: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children);
  return element;
}

/** Return the element of index.html that has this id. */
export function byId<E extends HTMLElement>(id: string, kind: new () => E): E {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`index.html has no ${kind.name} #${id}`);
  return found;
}

/** Call a function at the next frame, however often it is asked for before. */
export function oncePerFrame(work: () => void): () => void {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

/** Write a token so that spaces and line ends can be seen. */
export function visible(text: string): string {
  const spaces = (run: string): string => (run.length > 3 ? `␣×${run.length}` : "␣".repeat(run.length));
  return text.replace(/ +/g, spaces).replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
}

/** Quote a text in one line. */
export function quote(text: string): string {
  return `“${text.replaceAll("\n", "↵")}”`;
}

export function decimals(value: number, digits = 1): string {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}

export function percent(share: number): string {
  return share > 0 && share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`;
}

export function counted(count: number, what: string): string {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}
