// Small charts. Each is redrawn as a whole: there are few shapes, and one way to draw them.

import { s } from "./dom.ts";
import type { Point, Share } from "./figures.ts";

const HIGH = 84;
const NARROW = 190; // px
const LEFT = 34;
const BELOW = 15;
const TOP = 6;
const FEWEST_BARS = 8; // there is room for more than there are
const MOST_BARS = 80;

export interface Line {
  points: Point[];
  kind: string; // its class
}

/** Draw lines over time. `label`: what the chart shows, in words. */
export function lineChart(lines: Line[], label: string, width = NARROW): SVGSVGElement {
  const points = lines.flatMap((line) => line.points);
  const top = rounded(Math.max(1, ...points.map((point) => point.y)));
  const last = Math.max(0.1, ...points.map((point) => point.x));
  const svg = frame(width, label, String(top), ["0", `${last.toFixed(1)} s`]);
  for (const { points, kind } of lines) {
    const path = points.map(({ x, y }) => `${round(LEFT + (x / last) * (width - LEFT))} ${height(y / top)}`);
    if (path.length) svg.append(s("path", { d: `M${path.join("L")}`, class: `line ${kind}` }));
  }
  return svg;
}

/** Draw stacked bars. `bars`: the values of each bar, lowest first; long lists show their end. `kinds`: classes of values. */
export function barChart(bars: number[][], kinds: readonly string[], label: string): SVGSVGElement {
  const first = Math.max(0, bars.length - MOST_BARS);
  const seen = bars.slice(first);
  const top = rounded(Math.max(1, ...seen.map((values) => values.reduce((a, b) => a + b, 0))));
  const step = (NARROW - LEFT) / Math.max(seen.length, FEWEST_BARS);
  const svg = frame(LEFT + seen.length * step, label, String(top), [String(first + 1), String(bars.length)]);
  seen.forEach((values, index) => {
    let sum = 0;
    values.forEach((value, which) => {
      if (value) svg.append(bar(LEFT + index * step, step, sum / top, (sum + value) / top, kinds[which] ?? ""));
      sum += value;
    });
  });
  return svg;
}

/** Draw the share that was accepted, for each depth. */
export function shareChart(shares: Share[], label: string): SVGSVGElement {
  const step = (NARROW - LEFT) / Math.max(shares.length, FEWEST_BARS);
  const svg = frame(LEFT + shares.length * step, label, "100%", ["1", String(shares.length)]);
  shares.forEach(({ accepted, drafted }, index) => {
    const share = accepted / drafted;
    const x = LEFT + index * step;
    svg.append(bar(x, step, 0, 1, "ground"), bar(x, step, 0, share, "share"));
  });
  return svg;
}

/** Return a chart without values. `right`: where its values end. `top`: the largest value. `ends`: of the other axis. */
function frame(right: number, label: string, top: string, ends: [string, string]): SVGSVGElement {
  const width = Math.max(right, NARROW);
  const box = { viewBox: `0 0 ${width} ${HIGH + TOP + BELOW}`, class: "chart", role: "img", "aria-label": label };
  return s(
    "svg",
    box,
    ...[0, 1].map((share) => s("path", { d: `M${LEFT} ${height(share)}H${width}`, class: "grid" })),
    s("text", { x: LEFT - 5, y: height(1) + 4, class: "end" }, top),
    s("text", { x: LEFT - 5, y: height(0) + 4, class: "end" }, "0"),
    s("text", { x: LEFT, y: HIGH + TOP + 12 }, ends[0] === ends[1] ? "" : ends[0]),
    s("text", { x: right, y: HIGH + TOP + 12, class: "end" }, ends[1]),
  );
}

function bar(x: number, step: number, from: number, to: number, kind: string): SVGRectElement {
  const gap = step > 4 ? Math.min(4, step * 0.25) : 0;
  return s("rect", { x: round(x), y: height(to), width: round(step - gap), height: round((to - from) * HIGH), class: kind });
}

function height(share: number): number {
  return round(TOP + (1 - share) * HIGH);
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}

/** Return the next number of the form 1, 2, 3, 4, 5, 6, 8 or 10 times a power of ten. */
function rounded(value: number): number {
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value) ?? 10) * power;
}
