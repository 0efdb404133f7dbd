// The scaling calculator: what a step of DDP takes on N ranks, by the models of
// instruments.simulator, instruments.network and instruments.memory.

import { bytes, choice, html, mount, number, percent, plural, seconds, slider } from "./interactive.js";
import { allReduceSeconds } from "./network.js";
import { SCALING } from "./published.js";
import { MIB, evenLayers, simulate, slowestOf } from "./simulator.js";
import { inner, plot, streams } from "./streams.js";

const FORWARD = 1 / 3; // of the compute: 2 FLOPs per parameter and token, backward takes 4
const MOST_BUCKETS = 5000;
const MOST_RANKS = 16384;

// What is put in ------------------------------------------------------------------------------

// What a program reaches of the data sheets, and latencies, as instruments.network.NODES has them.
const GPUS = [
  { name: "H100 SXM, NVLink 4", peak: 989.5, inside: 360, switch: 292.5, hop: 0.6 },
  { name: "A100 SXM, NVLink 3", peak: 312, inside: 240, switch: 0, hop: 0.6 },
];
const ONE_CARD = { card: 11.875, cards: 1, wire: 25 };
const NETWORKS = [
  { name: "8 × 400 Gb/s InfiniBand", card: 47.5, cards: 8, wire: 5 },
  { name: "8 × 200 Gb/s InfiniBand", card: 23.75, cards: 8, wire: 5 },
  { name: "8 × 400 Gb/s EFA", card: 47.5, cards: 8, wire: 25 },
  { name: "4 × 100 Gb/s EFA", card: 11.875, cards: 4, wire: 73 },
  { name: "1 × 100 Gb/s Ethernet", ...ONE_CARD },
];
const SWITCH_ALPHA = 3.4e-6;

/** Every input: what it starts with, and what it may be. All are numbers. */
export const INPUTS = {
  ranks: { value: 8, min: 1, max: MOST_RANKS, whole: true },
  node: { value: 8, oneOf: [1, 2, 4, 8] },
  parameters: { value: 1700, min: 0.001, max: 1e6 }, // million
  gradient: { value: 4, oneOf: [2, 4] }, // bytes per element
  tokens: { value: 4096, min: 1, max: 1e9 }, // of a rank's micro-batch
  batches: { value: 1, min: 1, max: 1000, whole: true }, // micro-batches of a step
  peak: { value: GPUS[0].peak, min: 0.001, max: 1e6 }, // TFLOP/s
  reached: { value: 40, min: 0.1, max: 100 }, // % of the peak
  time: { value: 0, min: 0, max: 1e7 }, // ms of a micro-batch; 0: by FLOPs
  bucket: { value: 25, min: 0.01, max: 1e6 }, // MiB
  inside: { value: GPUS[0].inside, min: 1e-4, max: 1e5 }, // GB/s
  switch: { value: GPUS[0].switch, min: 0, max: 1e5 }, // GB/s; 0: the switch does not add
  hop: { value: GPUS[0].hop, min: 0, max: 1e7 }, // µs
  card: { value: NETWORKS[0].card, min: 1e-4, max: 1e5 }, // GB/s
  cards: { value: NETWORKS[0].cards, min: 1, max: 64, whole: true },
  wire: { value: NETWORKS[0].wire, min: 0, max: 1e7 }, // µs
  spread: { value: 0, min: 0, max: 100 }, // % of the compute
  stolen: { value: 0, min: 0, max: 100 }, // % of the compute
};

const DEFAULTS = Object.fromEntries(Object.entries(INPUTS).map(([name, { value }]) => [name, value]));

/** The numbers of ranks that fill their nodes: 1, 2, 4 … to one node, then whole nodes. */
export function worldSizes(ranksPerNode, most = MOST_RANKS) {
  const sizes = [];
  for (let ranks = 1; ranks < ranksPerNode; ranks *= 2) sizes.push(ranks);
  for (let ranks = ranksPerNode; ranks <= most; ranks *= 2) sizes.push(ranks);
  return sizes;
}

// The address ---------------------------------------------------------------------------------

const brief = (text) => (text.length > 40 ? `${text.slice(0, 40)}…` : text);

function expected({ oneOf, min, max, whole }) {
  if (oneOf) return `one of ${oneOf.join(", ")}`;
  return `a ${whole ? "whole " : ""}number from ${min} to ${max}`;
}

function isAllowed(value, { oneOf, min, max, whole }) {
  if (oneOf) return oneOf.includes(value);
  return value >= min && value <= max && (!whole || Number.isInteger(value));
}

/**
 * The inputs in the query of an address, `?sizing=ranks:64,tokens:4096`, and what is wrong with
 * it, in a line, or null. With anything wrong the inputs are the defaults.
 */
export function readAddress(query) {
  const text = new URLSearchParams(query).get("sizing");
  const inputs = { ...DEFAULTS };
  const refuse = (problem) => ({ inputs: { ...DEFAULTS }, problem: `${problem} These are the defaults.` });
  for (const part of text ? text.split(",") : []) {
    const [name, given, ...more] = part.split(":");
    if (!Object.hasOwn(INPUTS, name)) return refuse(`The address has “${brief(name)}”, which is none of ${Object.keys(INPUTS).join(", ")}.`);
    const value = /^\d+(\.\d+)?(e[+-]?\d+)?$/.test(given ?? "") && !more.length ? Number(given) : NaN;
    if (!isAllowed(value, INPUTS[name])) return refuse(`The address has ${name}:${brief(part.slice(name.length + 1))}, expected ${expected(INPUTS[name])}.`);
    inputs[name] = value;
  }
  if (!worldSizes(inputs.node).includes(inputs.ranks)) return refuse(`The address has ranks:${inputs.ranks}, expected a power of 2.`);
  return { inputs, problem: null };
}

/** The query that `readAddress` reads: what differs from the defaults. */
export function writeAddress(inputs) {
  const parts = Object.keys(INPUTS).filter((name) => inputs[name] !== DEFAULTS[name]).map((name) => `${name}:${inputs[name]}`);
  return `?sizing=${parts.join(",")}`;
}

// A step --------------------------------------------------------------------------------------

/** Bytes of the buckets: the first is small, so that communication starts early. */
export function bucketBytes(total, cap, firstCap) {
  const first = Math.min(total, firstCap, cap);
  const rest = total - first;
  const full = Math.floor(rest / cap);
  const sizes = [first, ...Array(full).fill(cap)];
  return rest > full * cap ? [...sizes, rest - full * cap] : sizes;
}

/** Seconds of forward and backward of a micro-batch: as given, or 6 FLOPs per parameter and token. */
export const computeSeconds = ({ time, parameters, tokens, peak, reached }) =>
  (time > 0 ? 1e-3 * time : (6 * parameters * 1e6 * tokens) / (peak * 1e12 * 0.01 * reached));

const link = (alpha, rate) => ({ alpha: alpha * 1e-6, beta: 1 / (rate * 1e9) });

/** The nodes as instruments.network has them. */
export const networkOf = ({ node, inside, hop, card, cards, wire, ...inputs }) => ({
  ranksPerNode: node,
  rails: cards,
  inside: link(hop, inside),
  rail: link(wire, card),
  switch: inputs.switch > 0 ? { ...link(0, inputs.switch), alpha: SWITCH_ALPHA } : null,
});

const gradientTotal = ({ parameters, gradient }) => Math.round(parameters * 1e6) * gradient;

/** A step on `worldSize` ranks, and its efficiency, speed-up and tokens per second. */
export function step(inputs, worldSize) {
  const network = networkOf(inputs);
  const cap = inputs.bucket * MIB;
  const sizes = bucketBytes(gradientTotal(inputs), cap, inputs.bucket === INPUTS.bucket.value ? MIB : cap);
  const compute = computeSeconds(inputs);
  const made = simulate(
    evenLayers(sizes, compute * FORWARD, compute * (1 - FORWARD)),
    (size) => allReduceSeconds(network, size, worldSize),
    null,
    { stolen: 0.01 * inputs.stolen, slowest: slowestOf(worldSize, 0.01 * inputs.spread) },
  );
  // The micro-batches before the last one only compute.
  const earlier = (inputs.batches - 1) * compute * slowestOf(worldSize, 0.01 * inputs.spread);
  const alone = inputs.batches * compute;
  const total = earlier + made.seconds;
  return {
    sizes, earlier, spans: made.spans, communication: made.communication,
    seconds: total, compute: alone, exposed: Math.max(0, total - alone),
    efficiency: alone / total,
    speedup: (worldSize * alone) / total,
    tokensPerSecond: (worldSize * inputs.batches * inputs.tokens) / total,
  };
}

// instruments.memory --------------------------------------------------------------------------

/** Bytes per parameter with Adam: all in fp32, or ZeRO's mixed precision. */
export const bytesPerParameter = (gradient) =>
  gradient === 4 ? { parameters: 4, gradients: 4, optimizer: 8 } : { parameters: 2, gradients: 2, optimizer: 12 };

/** Bytes on one rank. Stage 0 is DDP; 1 shards the optimizer's state, 2 gradients too, 3 all. */
export function memoryPerRank(parameterCount, worldSize, stage, each) {
  const shard = Math.ceil(parameterCount / worldSize);
  const of = (name, from) => each[name] * (stage >= from ? shard : parameterCount);
  return { parameters: of("parameters", 3), gradients: of("gradients", 2), optimizer: of("optimizer", 1) };
}

// Worked sizings ------------------------------------------------------------------------------

const hours = (tokens, each) => tokens / each.tokensPerSecond / 3600;
const duration = (count) => (count < 48 ? `${count.toFixed(count < 10 ? 1 : 0)} hours` : `${(count / 24).toFixed(count < 240 ? 1 : 0)} days`);
const ratio = (value) => Number(value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)).toLocaleString("en");

/** Each has a title, the inputs that differ from the defaults, and says what they lead to. */
export const SIZINGS = [
  {
    title: "1.7 billion parameters on one node",
    inputs: {},
    says: (inputs) => {
      const [one, all] = [step(inputs, 1), step(inputs, 8)];
      return `34 billion tokens take ${duration(hours(34e9, one))} on one H100 and ${duration(hours(34e9, all))} on eight, ` +
        `${ratio(all.speedup)} times as fast: inside a node backward hides nearly all of the communication.`;
    },
  },
  {
    title: "on two nodes",
    inputs: { ranks: 16 },
    says: (inputs) => {
      const row = (ranks, more = {}) => step({ ...inputs, ...more }, ranks);
      const each = [8, 16, 64, 256].map((ranks) =>
        `${duration(hours(34e9, row(ranks)))} on ${ranks} (efficiency ${percent(row(ranks).efficiency)})`);
      return `34 billion tokens take ${each.join(", ")}. ` +
        `Buckets of 100 MiB raise the last one to ${percent(row(256, { bucket: 100 }).efficiency)}.`;
    },
  },
  {
    title: "on two nodes, with one card of 100 Gb/s each",
    inputs: { ranks: 16, ...ONE_CARD },
    says: (inputs) => {
      const [node, both] = [step(inputs, 8), step(inputs, 16)];
      const mended = step({ ...inputs, gradient: 2, batches: 16 }, 16);
      return `34 billion tokens take ${duration(hours(34e9, node))} on one node and ${duration(hours(34e9, both))} on two: ` +
        "two are slower than one. Gradients of two bytes and 16 micro-batches per step " +
        `raise the efficiency from ${percent(both.efficiency)} to ${percent(mended.efficiency)}, if the larger batch still learns.`;
    },
  },
];

// The page ------------------------------------------------------------------------------------

/** [GPUs, what each does of what it did at the first point]. */
export function keptSpeed({ per, points }) {
  const rate = ([gpus, value]) => (per === "gpu" ? value : value / gpus);
  return points.map((point) => [point[0], rate(point) / rate(points[0])]);
}

function calculator(inputs, complaint = null) {
  const set = (name) => (value) => {
    inputs[name] = value;
    draw();
  };
  const boxes = {};
  function field(name, label, unit = "") {
    const { min, max, whole } = INPUTS[name];
    const made = number(label, { min, max, step: whole ? 1 : "any", unit, value: inputs[name] }, set(name));
    boxes[name] = made.box;
    return made;
  }

  // A choice of hardware fills several fields at once.
  function preset(label, options) {
    const fits = (option) => Object.keys(option).every((name) => !(name in INPUTS) || option[name] === inputs[name]);
    const select = html("select", {
      change: () => {
        for (const [name, value] of Object.entries(options[Number(select.value)])) {
          if (!(name in INPUTS)) continue;
          inputs[name] = value;
          boxes[name].value = value;
        }
        draw();
      },
    }, html("option", { value: "", hidden: true }, "your own"), options.map((option, i) =>
      html("option", { value: String(i) }, option.name)));
    const follow = () => {
      const found = options.findIndex(fits);
      select.value = found < 0 ? "" : String(found);
    };
    return { follow, element: html("label", { class: "select" }, html("span", {}, label), select) };
  }

  const sizesNow = () => worldSizes(inputs.node);
  const ranks = slider("Ranks", {
    min: 0, max: sizesNow().length - 1, value: sizesNow().indexOf(inputs.ranks),
    show: (value) => (sizesNow()[value] ?? 0).toLocaleString("en"),
  }, (value) => set("ranks")(sizesNow()[value]));

  const fromFlops = html("div", { class: "group" },
    field("tokens", "Tokens per micro-batch"), field("peak", "Peak", "TFLOP/s"), field("reached", "Reached", "%"));
  const fromTime = html("div", { class: "group" }, field("time", "Compute per micro-batch", "ms"));
  const byTime = (chosen) => {
    fromFlops.hidden = chosen;
    fromTime.hidden = !chosen;
    inputs.time = chosen ? Number(boxes.time.value) || Number((1e3 * computeSeconds(inputs)).toPrecision(3)) : 0;
    boxes.time.value = inputs.time || boxes.time.value;
    draw();
  };

  const gpu = preset("GPU", GPUS);
  const network = preset("Network", NETWORKS);
  const controls = html("div", { class: "controls" },
    ranks,
    html("div", { class: "group" },
      field("parameters", "Parameters", "million"),
      choice("Bytes per gradient", new Map([[4, "4"], [2, "2"]]), inputs.gradient, set("gradient")),
      field("batches", "Micro-batches per step"),
      field("bucket", "Bucket", "MiB"),
      choice("Compute", new Map([[false, "by FLOPs"], [true, "by time"]]), inputs.time > 0, byTime),
      fromFlops, fromTime),
    html("fieldset", { class: "group link" }, html("legend", {}, "Within a node"), gpu.element,
      choice("GPUs per node", new Map([[1, "1"], [2, "2"], [4, "4"], [8, "8"]]), inputs.node, (value) => {
        inputs.node = value;
        if (!sizesNow().includes(inputs.ranks)) inputs.ranks = sizesNow()[0];
        ranks.range.max = sizesNow().length - 1;
        draw();
      }),
      field("inside", "A GPU’s link", "GB/s"), field("switch", "Adding in the switch", "GB/s"), field("hop", "Latency", "µs"),
      html("p", { class: "note" }, "What a program reaches in one direction, 0.8 of the data sheet; the peak is bf16 without sparsity. A switch that adds: 0.65, or 0 where it cannot.")),
    html("fieldset", { class: "group link" }, html("legend", {}, "Between nodes"), network.element,
      field("card", "A card", "GB/s"), field("cards", "Cards per node"), field("wire", "Latency", "µs"),
      html("p", { class: "note" }, "What a program reaches, 0.95 of the data sheet. A node sends what all its cards send together.")),
    html("details", { class: "group", open: inputs.spread + inputs.stolen > 0 }, html("summary", {}, "What slows compute"),
      html("div", { class: "group" }, field("spread", "Ranks differ by", "%"), field("stolen", "Messages take of compute", "%")),
      html("p", { class: "note" }, "A step waits for its slowest rank: the more ranks, the later. The spread is a standard deviation, of exponential delays.")));

  const results = html("dl", { class: "results" });
  const status = html("p", { class: "visually-hidden", role: "status" });
  const picture = streams();
  const curve = html("div", { class: "curve" });
  const table = html("tbody");
  const memory = html("tbody");
  const problem = html("p", { class: "problem", role: "alert" }, complaint ?? "");
  const worked = html("p", { class: "worked" });
  const share = html("a", {}, "Address of these numbers");

  function draw() {
    const buckets = gradientTotal(inputs) / (inputs.bucket * MIB);
    const tooMany = buckets > MOST_BUCKETS;
    if (tooMany) problem.textContent = `That makes ${Math.ceil(buckets).toLocaleString("en")} buckets: choose a larger one.`;
    else if (problem.textContent !== complaint) problem.textContent = "";
    problem.hidden = !problem.textContent;
    outputs.hidden = tooMany;
    if (tooMany) return;
    gpu.follow();
    network.follow();
    ranks.set(sizesNow().indexOf(inputs.ranks));
    share.href = `${writeAddress(inputs)}${location.hash}`;
    const sizing = SIZINGS.find((each) => writeAddress({ ...DEFAULTS, ...each.inputs }) === writeAddress(inputs));
    worked.textContent = sizing ? sizing.says(inputs) : "";
    worked.hidden = !sizing;
    const all = sizesNow().map((size) => [size, step(inputs, size)]);
    const [, now] = all.find(([size]) => size === inputs.ranks);
    showResults(now);
    picture.draw({
      seconds: now.seconds,
      spans: [
        ...(now.earlier > 0 ? [{ stream: "compute", name: "earlier", start: 0, end: now.earlier }] : []),
        ...now.spans.map((span) => ({ ...span, start: span.start + now.earlier, end: span.end + now.earlier })),
      ],
    });
    showCurve(all, now);
    table.replaceChildren(...all.map(([size, each]) => html("tr", { class: size === inputs.ranks && "chosen" },
      html("th", { scope: "row" }, size.toLocaleString("en")),
      [seconds(each.communication), seconds(each.exposed), seconds(each.seconds), percent(each.efficiency), ratio(each.speedup)]
        .map((text) => html("td", {}, text)))));
    showMemory();
  }

  function showResults(now) {
    const n = inputs.ranks;
    const entries = [
      ["step", seconds(now.seconds), `${seconds(now.compute)} computing`],
      ["communication", seconds(now.communication), `${plural(now.sizes.length, "bucket")}, ${bytes(gradientTotal(inputs))}`],
      ["longer than alone", seconds(now.exposed), n > 1 ? "exposed messages, and the slowest rank" : "nothing to send"],
      ["scaling efficiency", percent(now.efficiency), `${ratio(now.speedup)} times one rank, of ${n.toLocaleString("en")}`],
    ];
    status.textContent = `${plural(n, "rank")}: step ${seconds(now.seconds)}, efficiency ${percent(now.efficiency)}`;
    results.replaceChildren(...entries.map(([what, value, note]) =>
      html("div", {}, html("dt", {}, what), html("dd", { class: "large" }, value), html("dd", { class: "note" }, note))));
  }

  function showCurve(all, now) {
    const inPercent = (points) => points.map(([count, part]) => [count, 100 * part]);
    const published = Object.values(SCALING);
    const { node, ranks: n } = inputs;
    curve.replaceChildren(plot({
      width: Math.max(240, inner(curve) || 700), height: 230, xs: sizesNow(), top: 110, below: "ranks",
      label: "scaling efficiency, %", marks: node > 1 ? [[node, "one node"]] : [],
      lines: { ideal: [[1, 100], [sizesNow().at(-1), 100]], reached: inPercent(all.map(([size, each]) => [size, each.efficiency])) },
      dots: Object.fromEntries(published.map((each, i) => [`published published-${i}`, inPercent(keptSpeed(each))])),
      chosen: [n, 100 * now.efficiency],
      alt: `Scaling efficiency against the number of ranks: ${percent(now.efficiency)} on ${plural(n, "rank")}, ` +
        `${percent(all.at(-1)[1].efficiency)} on ${all.at(-1)[0].toLocaleString("en")}. The table below has every number. ` +
        `Measured by others, kept from 8 to 256 GPUs: ${published.map((each) => `${each.name}, ${percent(keptSpeed(each).at(-1)[1])}`).join("; ")}.`,
    }));
  }

  function showMemory() {
    const each = bytesPerParameter(inputs.gradient);
    memory.replaceChildren(...["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"].map((name, stage) => {
      const held = memoryPerRank(Math.round(inputs.parameters * 1e6), inputs.ranks, stage, each);
      const total = held.parameters + held.gradients + held.optimizer;
      return html("tr", {}, html("th", { scope: "row" }, name),
        [held.parameters, held.gradients, held.optimizer, total].map((size) => html("td", {}, bytes(size))));
    }));
  }

  const head = (...names) => html("thead", {}, html("tr", {}, names.map((name) => html("th", { scope: "col" }, name))));
  const wide = (label, heads, body) => html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    html("table", {}, heads, body));
  const legend = html("p", { class: "legend" },
    html("span", {}, html("i", { class: "line" }), "computed"),
    html("span", {}, html("i", { class: "dashes" }), "ideal"),
    Object.values(SCALING).map(({ name, source }, i) =>
      html("span", {}, html("i", { class: `published-${i}` }), html("a", { href: source[1] }, name), ", measured by others, relative to 8 GPUs")));
  const outputs = html("div", { class: "outputs" },
    status, worked, results, picture.element, curve, legend,
    html("details", {}, html("summary", {}, "Every number of ranks"), wide("Every number of ranks",
      head("ranks", "communication", "longer by", "step", "efficiency", "speed-up"), table)),
    html("details", {}, html("summary", {}, "Memory per rank, with Adam"), wide("Memory per rank",
      head("method", "parameters", "gradients", "optimizer", "sum"), memory),
      html("p", { class: "note" }, "Four bytes per gradient: all in fp32. Two: ZeRO’s mixed precision. Without activations.")));

  const links = html("p", { class: "sizings" }, "Worked sizings: ",
    SIZINGS.map(({ title, inputs: chosen }, i) => [i ? " · " : "", html("a", {
      href: writeAddress({ ...DEFAULTS, ...chosen }),
      click: (event) => {
        event.preventDefault();
        const fresh = calculator({ ...DEFAULTS, ...chosen });
        widget.replaceWith(fresh);
        fresh.querySelectorAll(".sizings a")[i].focus();
      },
    }, title)]), " · ", share);
  const widget = html("div", { class: "widget scaling-calculator" }, links, problem, controls, outputs);
  fromFlops.hidden = inputs.time > 0;
  fromTime.hidden = !fromFlops.hidden;
  new ResizeObserver(() => draw()).observe(curve);
  draw();
  return widget;
}

mount("scaling-calculator", () => {
  const { inputs, problem } = readAddress(location.search);
  return calculator(inputs, problem);
});
