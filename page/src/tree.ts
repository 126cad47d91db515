// The drawing of a draft tree. The accepted path is the top line; what was drafted besides it hangs below.
// The shape of a node says where it comes from, its filling whether it was accepted.

import { type Draft, type DraftNode, type Origin, depthsOf } from "./answer.ts";
import { h, percent, s, visible } from "./dom.ts";

const ROW = 26; // px from row to row
const HIGH = 20; // height of a node
const GAP = 20; // between columns
const ADVANCE = 6.7; // of a monospaced character of 11 px
const PAD = 9;
const LONGEST = 14; // characters of a token that are shown
const MARGIN = 3;

type Kind = Origin | "model";

interface Place {
  kind: Kind;
  text: string;
  probability: number | null;
  accepted: boolean;
  depth: number;
  row: number;
  parent: Place | null;
}

export const NAMES: Record<Kind, string> = {
  root: "last token before",
  drafter: "drafter",
  lookup: "lookup",
  prediction: "prediction",
  model: "model’s own",
};

/** Draw the draft of a round. `label`: what it shows, in words. */
export function treeOf(draft: Draft, label: string): SVGSVGElement {
  const places = placed(draft);
  const columns = columnsOf(places);
  const right = Math.max(...places.map((place) => (columns[place.depth]?.x ?? 0) + widthOf(place)));
  const width = right + MARGIN;
  const height = (Math.max(...places.map((place) => place.row)) + 1) * ROW;
  const edges = s("g");
  const nodes = s("g");
  // Accepted nodes are drawn last, so that their edges lie on top.
  for (const place of [...places].sort((a, b) => Number(a.accepted) - Number(b.accepted))) {
    const x = columns[place.depth]?.x ?? 0;
    if (place.parent) edges.append(edgeOf(place, place.parent, x, columns));
    nodes.append(nodeOf(place, x));
  }
  const box = { viewBox: `0 0 ${width} ${height}`, width, height };
  return s("svg", { ...box, class: "tree", role: "img", "aria-label": label }, edges, nodes);
}

/** Return the nodes with their rows. A node has the row of its first child, and accepted children come first. */
function placed(draft: Draft): Place[] {
  const depths = depthsOf(draft);
  const accepted = new Set(draft.accepted);
  const places: Place[] = draft.nodes.map((node, index) => ({
    kind: index === 0 ? "root" : node.origin,
    text: node.text,
    probability: index === 0 ? null : node.probability,
    accepted: accepted.has(index),
    depth: depths[index] ?? 0,
    row: 0,
    parent: null,
  }));
  const children = new Map<Place, Place[]>();
  const attach = (child: Place, parent: Place | undefined): void => {
    if (!parent) return;
    child.parent = parent;
    children.set(parent, [...(children.get(parent) ?? []), child]);
  };
  places.forEach((place, index) => index > 0 && attach(place, places[draft.nodes[index]?.parent ?? 0]));
  const last = places[draft.accepted.at(-1) ?? 0];
  const own: Place = { kind: "model", text: draft.next.text, probability: null, accepted: true, depth: 0, row: 0, parent: null };
  own.depth = (last?.depth ?? 0) + 1;
  attach(own, last);
  let row = -1;
  const settle = (place: Place): number => {
    const below = [...(children.get(place) ?? [])].sort(order);
    place.row = below.length ? Math.min(...below.map(settle)) : ++row;
    return place.row;
  };
  if (places[0]) settle(places[0]);
  return [...places, own];
}

function order(a: Place, b: Place): number {
  return Number(b.accepted) - Number(a.accepted) || (b.probability ?? 0) - (a.probability ?? 0);
}

/** Return where each column begins. */
function columnsOf(places: Place[]): { x: number; width: number }[] {
  const columns: { x: number; width: number }[] = [];
  const deepest = Math.max(...places.map((place) => place.depth));
  let x = MARGIN;
  for (let depth = 0; depth <= deepest; depth++) {
    const width = Math.max(...places.filter((place) => place.depth === depth).map(widthOf));
    columns.push({ x, width });
    x += width + GAP;
  }
  return columns;
}

function shown(text: string): string {
  const characters = [...visible(text)];
  return characters.length > LONGEST ? `${characters.slice(0, LONGEST - 1).join("")}…` : characters.join("");
}

/** Characters of East Asian scripts and emoji take two places. */
function places(text: string): number {
  return [...text].reduce((sum, character) => sum + ((character.codePointAt(0) ?? 0) >= 0x1100 && character !== "…" && !"␣↵⇥∅".includes(character) ? 2 : 1), 0);
}

function figure(place: Place): string {
  return place.probability === null ? "" : percent(place.probability);
}

function widthOf(place: Place): number {
  const extra = figure(place) ? 1 + figure(place).length : 0;
  return (places(shown(place.text)) + extra) * ADVANCE + 2 * PAD;
}

function edgeOf(place: Place, parent: Place, x: number, columns: { x: number; width: number }[]): SVGPathElement {
  const from = (columns[parent.depth]?.x ?? 0) + widthOf(parent);
  const [y0, y1] = [middle(parent), middle(place)];
  const turn = x - GAP / 2 - 2;
  const bend = Math.min(8, Math.abs(y1 - y0));
  const path =
    y0 === y1 ? `M${from} ${y0}H${x}` : `M${from} ${y0}H${turn - bend}Q${turn} ${y0} ${turn} ${y0 + bend}V${y1 - bend}Q${turn} ${y1} ${turn + bend} ${y1}H${x}`;
  return s("path", { d: path, class: classOf("edge", place) });
}

function nodeOf(place: Place, x: number): SVGGElement {
  const width = widthOf(place);
  const top = place.row * ROW + (ROW - HIGH) / 2;
  const text = s("text", { x: x + PAD, y: top + 14 }, shown(place.text));
  const share = s("text", { x: x + width - PAD, y: top + 14, class: "share" }, figure(place));
  return s("g", { class: classOf("node", place) }, s("title", {}, described(place)), outline(place.kind, x, top, width), text, share);
}

/** Return the shape that stands for an origin. */
export function outline(kind: Kind, x: number, y: number, width: number, height = HIGH): SVGElement {
  if (kind === "prediction") {
    const cut = 6;
    const [right, below, half] = [x + width, y + height, y + height / 2];
    return s("path", { d: `M${x} ${half}L${x + cut} ${y}H${right - cut}L${right} ${half}L${right - cut} ${below}H${x + cut}Z` });
  }
  const radius = kind === "drafter" ? height / 2 : kind === "model" ? 4 : 0;
  return s("rect", { x, y, width, height, rx: radius });
}

function classOf(what: string, place: Place): string {
  return `${what} ${place.kind} ${place.accepted ? "accepted" : "rejected"}`;
}

function middle(place: Place): number {
  return place.row * ROW + ROW / 2;
}

function described(place: Place): string {
  if (place.kind === "root") return `“${place.text}” was decided before this round.`;
  if (place.kind === "model") return `“${place.text}” is the model’s own choice after the accepted path.`;
  const probability = place.probability === null ? "" : `, probability ${place.probability.toFixed(3)}`;
  return `“${place.text}”: ${place.kind}, depth ${place.depth}${probability}, ${place.accepted ? "accepted" : "not accepted"}.`;
}

/** Return the draft of a round as a table, for who does not see the drawing. */
export function tableOf(draft: Draft): HTMLTableElement {
  const depths = depthsOf(draft);
  const head = ["Depth", "Token", "After", "Origin", "Probability", "Accepted"].map((name) => h("th", { scope: "col" }, name));
  const row = (node: DraftNode, index: number): HTMLTableRowElement => {
    const parent = draft.nodes[node.parent]?.text ?? "";
    const probability = node.probability === null ? "–" : node.probability.toFixed(3);
    const cells = [String(depths[index]), visible(node.text), visible(parent), node.origin, probability];
    const verdict = draft.accepted.includes(index) ? "yes" : "no";
    return h("tr", {}, ...[...cells, verdict].map((cell) => h("td", {}, cell)));
  };
  const rows = draft.nodes.map(row).slice(1);
  return h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows));
}
