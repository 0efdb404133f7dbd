// The bucket tuner: a step of a model with buckets of any cap and on any link, computed by
// instruments.simulator, and by how much it is longer than backward.

import { binaryBytes, choice, html, mount, number, plural, seconds, slider } from "./interactive.js";
import { MODELS, elementsOf, layersOf, totalElements } from "./models.js";
import { allReduceSeconds, measuredSeconds, volume } from "./network.js";
import { ALL_REDUCE } from "./published.js";
import { MIB, buckets, simulate } from "./simulator.js";
import { inner, plot, streams } from "./streams.js";

const DEFAULT_CAP = 25;
const H100 = { stolen: 8 / 108, filling: 2 / 3.35e12, emptying: 2 / 3.35e12 }; // instruments.h100
const COMPUTED = "h100_64"; // eight nodes: instruments.network.NODES["DGX H100"]
const NODES_OF_EIGHT = {
  ranksPerNode: 8, rails: 8, inside: { alpha: 0.6e-6, beta: 1 / 360e9 },
  rail: { alpha: 5e-6, beta: 1 / 47.5e9 }, switch: { alpha: 3.4e-6, beta: 1 / 292.5e9 },
};
export const CAPS = [0.25, 0.5, 1, 2, 4, 8, 16, DEFAULT_CAP, 50, 100, 200, 400, 800, 1600]; // MiB

/** Seconds of an all-reduce: by the table `inputs.measured`, by the network of 64 GPUs, or alpha + bytes / bandwidth. */
export function linkOf({ measured, alpha, bandwidth }) {
  if (measured === COMPUTED) return (bytes) => allReduceSeconds(NODES_OF_EIGHT, bytes, 64);
  if (!measured) return (bytes) => alpha + bytes / bandwidth;
  const points = ALL_REDUCE[measured].points.map(([bytes, microseconds]) => [bytes, microseconds * 1e-6]);
  return (bytes) => measuredSeconds(points, bytes);
}

/** A step with buckets of `cap` MiB. As in torch, the default alone has a first bucket of 1 MiB. */
export function tuned(inputs, cap) {
  const layers = layersOf(MODELS[inputs.model], 1.5 * inputs.backward);
  const plan = buckets(layers, cap * MIB, cap === DEFAULT_CAP ? MIB : cap * MIB);
  return { ...simulate(layers, linkOf(inputs), plan, H100), buckets: plan.length };
}

function build() {
  const inputs = { measured: "allreduce_h100_8gpu", alpha: 30e-6, bandwidth: 250e9, backward: 0.026, model: "smollm2-360m-classifier" };
  let position = CAPS.indexOf(DEFAULT_CAP);

  const nameOf = (cap) => `${cap} MiB${cap === DEFAULT_CAP ? ", the default" : ""}`;
  const field = (label, unit, name, factor, bounds) =>
    number(label, { ...bounds, unit, value: Number((inputs[name] / factor).toPrecision(6)) }, (typed) => {
      inputs[name] = typed * factor;
      draw();
    });
  const own = html("div", { class: "own", hidden: true },
    field("α of a bucket", "µs", "alpha", 1e-6, { min: 0, max: 1e7 }),
    field("Bandwidth of a bucket", "GB/s", "bandwidth", 1e9, { min: 1e-4, max: 1e5 }));
  const links = new Map([...Object.entries(ALL_REDUCE).map(([table, { name }]) => [table, name]), [COMPUTED, "64 × H100, eight nodes, computed"], ["", "α and bandwidth"]]);
  const models = html("select", { change: () => {
    inputs.model = models.value;
    draw();
  } }, Object.entries(MODELS).map(([name, { title }]) => html("option", { value: name, selected: name === inputs.model }, title)));
  const controls = html("div", { class: "controls" },
    slider("Cap of a bucket", { min: 0, max: CAPS.length - 1, value: position, show: (i) => nameOf(CAPS[i]) }, (value) => {
      position = value;
      draw();
    }),
    html("label", { class: "select" }, html("span", {}, "Model"), models),
    field("Backward", "ms", "backward", 1e-3, { min: 0.01, max: 1e6 }),
    choice("All-reduce", links, inputs.measured, (table) => {
      inputs.measured = table;
      own.hidden = Boolean(table);
      draw();
    }),
    own);

  const picture = streams();
  const curves = html("div", { class: "curves" });
  const summary = html("p", { class: "summary", role: "status" });
  const source = html("p", { class: "note" });

  function draw() {
    const cap = CAPS[position];
    const steps = CAPS.map((each) => tuned(inputs, each));
    const now = steps[position];
    const best = steps.reduce((least, step, i) => (step.exposed < steps[least].exposed ? i : least), 0);
    picture.draw(now);
    drawCurves(cap, steps, now);
    summary.replaceChildren(
      `${plural(now.buckets, "bucket")} ${now.buckets === 1 ? "needs" : "need"} the link for ${seconds(now.communication)}. The step is longer by `,
      html("strong", {}, seconds(now.exposed)),
      best === position ? ": no other cap here leaves less." : `; ${seconds(steps[best].exposed)} with ${nameOf(CAPS[best])}.`);
    const table = ALL_REDUCE[inputs.measured];
    const model = MODELS[inputs.model];
    source.replaceChildren(
      `Computed for ${model.title}: gradients of ${binaryBytes(4 * totalElements(model))}, of which the first tensor’s ${binaryBytes(4 * elementsOf(model.parameters[0]))} are ready last. ` +
      "Counted are messages, copies into buckets and back on an H100, and the multiprocessors that messages take. ",
      ...(inputs.measured === COMPUTED ? ["All-reduces by a model of the network."] : table ? ["All-reduces as ", html("a", { href: table.source[1] }, `measured by ${table.source[0]}`), ` on ${table.name}.`] : ["The link is your own."]));
  }

  function drawCurves(cap, steps, now) {
    const width = Math.max(240, inner(curves) || 700);
    const link = linkOf(inputs);
    const table = ALL_REDUCE[inputs.measured];
    const part = volume("ring", table?.ranks ?? (inputs.measured === COMPUTED ? 64 : 2));
    const rate = (bytes) => (1e-9 * bytes * part) / link(bytes);
    const dots = (table?.points ?? []).map(([bytes]) => [bytes / MIB, rate(bytes)])
      .filter(([size]) => size >= CAPS[0] && size <= CAPS.at(-1));
    const line = [...CAPS.map((each) => [each, rate(each * MIB)]), ...dots].sort(([a], [b]) => a - b);
    const waits = steps.map((step, i) => [CAPS[i], 1000 * step.exposed]);
    const common = { width, xs: CAPS, marks: [[DEFAULT_CAP, "25 MiB"]] };
    curves.replaceChildren(
      plot({
        ...common, height: 132, label: `${table ? "bus bandwidth" : "bandwidth"}, GB/s`,
        top: 1.08 * Math.max(...line.map(([, value]) => value)), lines: { reached: line }, dots: { published: dots }, chosen: [cap, rate(cap * MIB)],
        alt: `Bandwidth against the size of a bucket: ${rate(DEFAULT_CAP * MIB).toPrecision(3)} GB/s at 25 MiB, ` +
          `${rate(CAPS.at(-1) * MIB).toPrecision(3)} at ${CAPS.at(-1)} MiB.`,
      }),
      plot({
        ...common, height: 156, label: "longer by, ms", below: "cap in MiB",
        top: 1.08 * Math.max(...waits.map(([, value]) => value)), lines: { reached: waits }, chosen: [cap, 1000 * now.exposed],
        alt: `By how much a step is longer, against the cap: ${seconds(steps[0].exposed)} at ${CAPS[0]} MiB, ` +
          `${seconds(steps[CAPS.indexOf(DEFAULT_CAP)].exposed)} at 25 MiB, ${seconds(steps.at(-1).exposed)} at ${CAPS.at(-1)} MiB.`,
      }));
  }

  new ResizeObserver(() => draw()).observe(curves);
  draw();
  return html("div", { class: "widget bucket-tuner" }, controls, picture.element, curves, summary, source);
}

mount("bucket-tuner", build);
