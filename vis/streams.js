// The two streams of a simulated step, drawn to scale.

import { html, svg, tick } from "./interactive.js";

const MOST_BARS = 300;
const LETTER = 8; // pixels, at most

/** The width inside an element's padding, in pixels. */
export function inner(element) {
  const { paddingLeft, paddingRight } = getComputedStyle(element);
  return element.clientWidth - parseFloat(paddingLeft || 0) - parseFloat(paddingRight || 0);
}

/** Compute without its numbers: passes of forward and backward, one after the other. */
export function passes(spans) {
  const found = [];
  for (const { stream, name, start, end } of spans) {
    if (stream !== "compute") continue;
    const word = name.split(" ")[0];
    if (found.at(-1)?.word === word) found.at(-1).end = end;
    else found.push({ word, start, end });
  }
  return found;
}

/** An element, and `draw(step)` for it. */
export function streams() {
  const [compute, link, axis] = ["", "", " scale"].map((more) => html("div", { class: `strip${more}` }));
  const row = (name, strip) => html("div", { class: "stream" }, html("span", {}, name), strip);
  const element = html("div", { class: "streams", "aria-hidden": "true" },
    row("compute", compute), row("link", link), row("ms", axis));

  function draw({ spans, seconds }) {
    const pixels = ((inner(element) || 600) - 95) / seconds;
    const place = (name, { start, end }, text = "") => html("span", {
      class: name, style: { left: `${(100 * start) / seconds}%`, width: `${(100 * (end - start)) / seconds}%` },
    }, (end - start) * pixels > LETTER * text.length ? text : "");
    const made = passes(spans).filter((pass) => pass.end > pass.start);
    const gaps = made.map((pass, i) => ({ start: pass.end, end: made[i + 1]?.start ?? seconds }))
      .filter(({ start, end }) => end > start * (1 + 1e-9));
    compute.replaceChildren(
      ...made.map((pass) => place(`pass ${pass.word}`, pass, pass.word)),
      ...gaps.map((gap) => place("waits", gap, "waits")));
    const sent = spans.filter((span) => span.stream === "communication");
    const bars = sent.length <= MOST_BARS ? sent : [{ start: sent[0].start, end: sent.at(-1).end }];
    link.replaceChildren(...bars.filter((bar) => bar.end > bar.start).map((bar) => place("message", bar)));
    const step = tick(1000 * seconds, 6);
    axis.replaceChildren(...Array.from({ length: Math.floor((1000 * seconds) / step + 1e-9) + 1 }, (_, i) =>
      html("span", { style: { left: `${(100 * i * step) / (1000 * seconds)}%` } }, String(Number((i * step).toPrecision(6))))));
  }

  return { element, draw };
}

/**
 * Curves over a logarithmic axis with the values `xs`, as an SVG. The other axis runs from 0 to
 * `top` and is named by `label`. `lines` and `dots` map a class to a list of [x, y], `marks` are
 * [x, text], `chosen` is one [x, y]; with `below` the axis below is drawn and named.
 */
export function plot({ width, height, xs, top, label, lines, dots = {}, marks = [], chosen, alt, below }) {
  const [left, right, high, low] = [46, width - 26, 24, height - (below ? 36 : 20)];
  const [first, last] = [Math.log2(xs[0]), Math.log2(xs.at(-1))];
  const x = (value) => left + ((right - left) * (Math.log2(value) - first)) / (last - first);
  const y = (value) => low - ((low - high) * value) / top;
  const step = tick(top, 4);
  const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const every = width < 480 ? 3 : 2;
  return svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": alt },
    Array.from({ length: Math.floor(top / step + 1e-9) + 1 }, (_, i) => [
      svg("path", { class: "gridline", d: `M${left} ${y(i * step)}H${right}` }),
      svg("text", { x: left - 8, y: y(i * step) + 4, "text-anchor": "end" }, String(Number((i * step).toPrecision(6)))),
    ]),
    marks.map(([at, text]) => [
      svg("path", { class: "mark", d: `M${x(at)} ${high - 8}V${low}` }),
      svg("text", { class: "marked", x: x(at) + 5, y: high - 1 }, text),
    ]),
    svg("text", { x: 4, y: 12 }, label),
    below && xs.filter((_, i) => i % every === 0).map((value) =>
      svg("text", { x: x(value), y: low + 16, "text-anchor": "middle" }, value.toLocaleString("en"))),
    below && svg("text", { x: width, y: height - 4, "text-anchor": "end" }, below),
    Object.entries(lines).map(([name, points]) => svg("path", { class: name, d: path(points) })),
    Object.entries(dots).map(([name, points]) => points.map(([a, b]) =>
      svg("rect", { class: name, x: x(a) - 3, y: y(b) - 3, width: 6, height: 6 }))),
    svg("circle", { class: "chosen", cx: x(chosen[0]), cy: y(chosen[1]), r: 6 }));
}
