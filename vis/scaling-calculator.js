// The scaling calculator: what a step of DDP takes on N ranks, by the models of
// instruments.simulator, instruments.network and instruments.memory.

import { bytes, choice, html, mount, number, percent, plural, seconds, slider } from "./interactive.js";
import { MODELS, elementsOf, layersOf, parse, productsOf, totalElements } from "./models.js";
import { allReduceSeconds, measuredOn, measuredSeconds, readNcclTests } from "./network.js";
import { SCALING } from "./published.js";
import { MIB, buckets, gradientBytes, simulate, slowestOf } from "./simulator.js";
import { inner, plot, streams } from "./streams.js";

const MOST_RANKS = 16384;
const ADAMW_BYTES = 28; // instruments.cost: moved for each element
const OWN = "own";

// What is put in ------------------------------------------------------------------------------

// What a program reaches of the data sheets, and latencies, as instruments.network.NODES has them.
const GPUS = [
  { name: "H100 SXM, NVLink 4", peak: 989.5, memory: 80, moved: 3350, inside: 360, switch: 292.5, hop: 0.6 },
  { name: "A100 80 GB SXM, NVLink 3", peak: 312, memory: 80, moved: 2039, inside: 240, switch: 0, hop: 0.6 },
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

/** Every input: what it starts with, and what it may be. All but the model are numbers. */
export const INPUTS = {
  ranks: { value: 8, min: 1, max: MOST_RANKS, whole: true },
  node: { value: 8, oneOf: [1, 2, 4, 8] },
  model: { value: "smollm2-1.7b", oneOf: Object.keys(MODELS) },
  gradient: { value: 4, oneOf: [2, 4] }, // bytes per element
  views: { value: 0, oneOf: [0, 1] }, // gradient_as_bucket_view
  tokens: { value: 4096, min: 1, max: 1e9 }, // or images, of a rank's micro-batch
  batches: { value: 1, min: 1, max: 1000, whole: true }, // micro-batches of a step
  peak: { value: GPUS[0].peak, min: 0.001, max: 1e6 }, // TFLOP/s
  reached: { value: 40, min: 0.1, max: 100 }, // % of the peak
  time: { value: 0, min: 0, max: 1e7 }, // ms of a micro-batch; 0: by FLOPs
  memory: { value: GPUS[0].memory, min: 0.1, max: 1e5 }, // GB
  moved: { value: GPUS[0].moved, min: 0.1, max: 1e6 }, // GB/s of the memory
  bucket: { value: 25, min: 0.01, max: 1e6 }, // MiB
  inside: { value: GPUS[0].inside, min: 1e-4, max: 1e5 }, // GB/s
  switch: { value: GPUS[0].switch, min: 0, max: 1e5 }, // GB/s; 0: the switch does not add
  hop: { value: GPUS[0].hop, min: 0, max: 1e7 }, // µs
  card: { value: NETWORKS[0].card, min: 1e-4, max: 1e5 }, // GB/s
  cards: { value: NETWORKS[0].cards, min: 1, max: 64, whole: true },
  wire: { value: NETWORKS[0].wire, min: 0, max: 1e7 }, // µs
  spread: { value: 0, min: 0, max: 100 }, // % of the compute
  stolen: { value: 7.4, min: 0, max: 100 }, // % of the compute: 8 of 108 multiprocessors
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
    const isNumber = /^\d+(\.\d+)?(e[+-]?\d+)?$/.test(given ?? "") && !more.length;
    const value = isNumber && name !== "model" ? Number(given) : name === "model" && !more.length ? given : NaN;
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

/** The model of the inputs, or the list of one's own. */
const modelOf = ({ model }, own) => (model === OWN ? own.model : MODELS[model]);

/** Seconds of forward and backward of a micro-batch: as given, or 6 FLOPs per multiplication. */
export const computeSeconds = ({ time, tokens, peak, reached }, model) =>
  (time > 0 ? 1e-3 * time : (6 * productsOf(model) * tokens) / (peak * 1e12 * 0.01 * reached));

const link = (alpha, rate) => ({ alpha: alpha * 1e-6, beta: 1 / (rate * 1e9) });

/** The nodes as instruments.network has them. */
export const networkOf = ({ node, inside, hop, card, cards, wire, ...inputs }) => ({
  ranksPerNode: node,
  rails: cards,
  inside: link(hop, inside),
  rail: link(wire, card),
  switch: inputs.switch > 0 ? { ...link(0, inputs.switch), alpha: SWITCH_ALPHA } : null,
});

/** Seconds of an all-reduce: by what nccl-tests printed, or by the network. */
function linkOf(inputs, worldSize, nccl) {
  if (worldSize === 1) return () => 0;
  if (!nccl) return (size) => allReduceSeconds(networkOf(inputs), size, worldSize);
  const points = worldSize === nccl.ranks ? nccl.points : measuredOn(nccl, worldSize);
  return (size) => measuredSeconds(points, size);
}

/**
 * A step on `worldSize` ranks, and its efficiency, speed-up and work per second. `own` may hold a
 * `model` of one's own, and `nccl`, a table of nccl-tests. A rank alone needs no DDP.
 */
export function step(inputs, worldSize, own = {}) {
  const model = modelOf(inputs, own);
  const compute = computeSeconds(inputs, model);
  const layers = layersOf(model, compute, inputs.gradient);
  const cap = inputs.bucket * MIB;
  const plan = buckets(layers, cap, inputs.bucket === INPUTS.bucket.value ? MIB : cap);
  const copied = worldSize > 1 ? 2 / (inputs.moved * 1e9) : 0;
  const slowest = slowestOf(worldSize, 0.01 * inputs.spread);
  const made = simulate(layers, linkOf(inputs, worldSize, own.nccl), plan, {
    stolen: 0.01 * inputs.stolen,
    slowest,
    filling: copied,
    emptying: inputs.views ? 0 : copied,
    optimizer: (ADAMW_BYTES * totalElements(model)) / (inputs.moved * 1e9),
  });
  // The micro-batches before the last one only compute.
  const earlier = (inputs.batches - 1) * compute * slowest;
  const alone = (inputs.batches - 1) * compute + made.compute;
  const total = earlier + made.seconds;
  const sizes = gradientBytes(layers);
  return {
    sizes: plan.map((bucket) => bucket.reduce((sum, number) => sum + sizes[number], 0)),
    earlier, spans: made.spans, communication: made.communication,
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

/** Bytes that forward keeps for backward, casts and logits with them; null where there is no formula. */
export function activationBytes({ shape, vocabulary }, tokens, gradient) {
  if (!shape) return null;
  const [hidden, inner, layers, heads, keyHeads] = shape;
  const [ofHidden, ofKeys, ofInner, atEnd] = gradient === 4 ? [30, 4, 8, 10] : [20, 4, 8, 8];
  const keys = Math.floor(hidden / heads) * keyHeads;
  const layer = ofHidden * hidden + ofKeys * keys + ofInner * inner + 4 * heads + 8;
  return tokens * (layers * layer + atEnd * hidden + 12 + 12 * vocabulary);
}

/** The bfloat16 copies of the matrices that autocast keeps until backward. */
export const castBytes = (model, gradient) => (gradient === 4
  ? 2 * model.parameters.filter(({ shape }) => shape.length >= 2).reduce((sum, part) => sum + elementsOf(part), 0) : 0);

/** What a rank of DDP holds when backward begins, in bytes, and whether its GPU has them. */
export function fits(inputs, own = {}) {
  const model = modelOf(inputs, own);
  const count = totalElements(model);
  const held = memoryPerRank(count, inputs.ranks, 0, bytesPerParameter(inputs.gradient));
  const buckets = inputs.views || inputs.ranks === 1 ? 0 : count * inputs.gradient;
  const activations = activationBytes(model, inputs.tokens, inputs.gradient);
  const kept = activations === null ? 0 : activations + castBytes(model, inputs.gradient);
  const total = held.parameters + held.gradients + held.optimizer + buckets + kept;
  return { ...held, buckets, activations: activations === null ? null : kept, total, fits: total <= inputs.memory * 1e9 };
}

// Worked sizings ------------------------------------------------------------------------------

const hours = (tokens, each) => tokens / each.tokensPerSecond / 3600;
const duration = (count) => (count < 48 ? `${count.toFixed(count < 10 ? 1 : 0)} hours` : `${(count / 24).toFixed(count < 240 ? 1 : 0)} days`);
const ratio = (value) => Number(value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)).toLocaleString("en");

/** Each has a title, the inputs that differ from the defaults, and says what they lead to. */
export const SIZINGS = [
  {
    title: "SmolLM2-1.7B on one node",
    inputs: {},
    says: (inputs) => {
      const [one, all] = [step(inputs, 1), step(inputs, 8)];
      return `34 billion tokens take ${duration(hours(34e9, one))} on one H100 and ${duration(hours(34e9, all))} on eight, ` +
        `${ratio(all.speedup)} times as fast. Inside a node most of what is lost is copies into buckets and back.`;
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
        `Four micro-batches per step raise the last one to ${percent(row(256, { batches: 4 }).efficiency)}.`;
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
  const own = {}; // what was pasted: a model, and a table of nccl-tests
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
    field("tokens", "Tokens or images per micro-batch"), field("peak", "Peak", "TFLOP/s"), field("reached", "Reached", "%"));
  const fromTime = html("div", { class: "group" }, field("time", "Compute per micro-batch", "ms"));
  const byTime = (chosen) => {
    fromFlops.hidden = chosen;
    fromTime.hidden = !chosen;
    inputs.time = chosen ? Number(boxes.time.value) || Number((1e3 * computeSeconds(inputs, modelOf(inputs, own))).toPrecision(3)) : 0;
    boxes.time.value = inputs.time || boxes.time.value;
    draw();
  };

  // A text that is pasted: `read` takes it, or throws an Error of one line.
  function pasted(label, placeholder, read) {
    const box = html("textarea", { rows: 3, placeholder, spellcheck: "false", input: () => {
      let wrong = "";
      try {
        read(box.value.trim() ? box.value : "");
      } catch (error) {
        wrong = error.message;
      }
      refusal.textContent = wrong;
      refusal.hidden = !wrong;
      if (!wrong) draw();
    } });
    const refusal = html("p", { class: "problem", role: "alert", hidden: true });
    return html("div", { class: "pasted" }, html("label", {}, html("span", {}, label), box), refusal);
  }

  const list = pasted("Its tensors, one in a line", "fc.weight (10, 20)", (text) => {
    own.model = parse(text);
  });
  const showList = () => {
    list.hidden = inputs.model !== OWN;
  };
  const models = html("select", {
    change: () => {
      if (models.value === OWN && !own.model) own.model = { ...MODELS[inputs.model], title: "your list" };
      inputs.model = models.value;
      showList();
      draw();
    },
  }, Object.entries(MODELS).map(([name, { title }]) => html("option", { value: name, selected: name === inputs.model }, title)),
  html("option", { value: OWN }, "a list of your own"));
  const nccl = pasted("What nccl-tests’ all_reduce_perf printed, in place of both", "# nThread 1 nGpus 8 …", (text) => {
    own.nccl = text ? readNcclTests(text) : null;
  });

  const gpu = preset("GPU", GPUS);
  const network = preset("Network", NETWORKS);
  const controls = html("div", { class: "controls" },
    ranks,
    html("div", { class: "group" },
      html("label", { class: "select" }, html("span", {}, "Model"), models),
      list,
      choice("Bytes per gradient", new Map([[4, "4"], [2, "2"]]), inputs.gradient, set("gradient")),
      field("batches", "Micro-batches per step"),
      field("bucket", "Bucket", "MiB"),
      choice("Gradients as views", new Map([[0, "no"], [1, "yes"]]), inputs.views, set("views")),
      choice("Compute", new Map([[false, "by FLOPs"], [true, "by time"]]), inputs.time > 0, byTime),
      fromFlops, fromTime),
    html("fieldset", { class: "group link" }, html("legend", {}, "Within a node"), gpu.element,
      choice("GPUs per node", new Map([[1, "1"], [2, "2"], [4, "4"], [8, "8"]]), inputs.node, (value) => {
        inputs.node = value;
        if (!sizesNow().includes(inputs.ranks)) inputs.ranks = sizesNow()[0];
        ranks.range.max = sizesNow().length - 1;
        draw();
      }),
      field("memory", "Memory", "GB"), field("moved", "Its bandwidth", "GB/s"), field("inside", "A GPU’s link", "GB/s"), field("switch", "Adding in the switch", "GB/s"), field("hop", "Latency", "µs"),
      html("p", { class: "note" }, "What a program reaches in one direction, 0.8 of the data sheet; the peak is bf16 without sparsity. A switch that adds: 0.65, or 0 where it cannot.")),
    html("fieldset", { class: "group link" }, html("legend", {}, "Between nodes"), network.element,
      field("card", "A card", "GB/s"), field("cards", "Cards per node"), field("wire", "Latency", "µs"),
      html("p", { class: "note" }, "What a program reaches, 0.95 of the data sheet. A node sends what all its cards send together.")),
    html("details", { class: "group" }, html("summary", {}, "A link that was measured"), nccl,
      html("p", { class: "note" }, "For other numbers of ranks it is scaled as a ring of the same links.")),
    html("details", { class: "group", open: inputs.spread > 0 }, html("summary", {}, "What slows compute"),
      html("div", { class: "group" }, field("spread", "Ranks differ by", "%"), field("stolen", "Messages take of compute", "%")),
      html("p", { class: "note" }, "A step waits for its slowest rank: the more ranks, the later. The spread is a standard deviation, of exponential delays. Messages occupied 8 of 108 multiprocessors in a published trace of two A100s.")));

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
    gpu.follow();
    network.follow();
    ranks.set(sizesNow().indexOf(inputs.ranks));
    share.href = `${writeAddress(inputs)}${location.hash}`;
    const sizing = SIZINGS.find((each) => writeAddress({ ...DEFAULTS, ...each.inputs }) === writeAddress(inputs));
    const isWorked = sizing && inputs.model !== OWN && !own.nccl;
    worked.textContent = isWorked ? sizing.says(inputs) : "";
    worked.hidden = !isWorked;
    share.hidden = inputs.model === OWN;
    problem.hidden = !problem.textContent;
    const all = sizesNow().map((size) => [size, step(inputs, size, own)]);
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
    const held = fits(inputs, own);
    const counted = held.activations === null ? "without activations" : "with activations";
    const entries = [
      [held.fits ? "it fits" : "it does not fit", bytes(held.total), `${counted}, of ${bytes(inputs.memory * 1e9)} on each GPU`],
      ["step", seconds(now.seconds), `${seconds(now.compute)} computing, AdamW included`],
      ["communication", seconds(now.communication), `${plural(now.sizes.length, "bucket")}, ${bytes(totalElements(modelOf(inputs, own)) * inputs.gradient)}`],
      ["longer than alone", seconds(now.exposed), n > 1 ? "exposed messages, copies, lost multiprocessors, the slowest rank" : "nothing to send"],
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
    const { buckets: again, activations } = fits(inputs, own);
    memory.replaceChildren(...["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"].map((name, stage) => {
      const held = memoryPerRank(totalElements(modelOf(inputs, own)), inputs.ranks, stage, each);
      const twice = stage === 0 ? again : 0;
      const total = held.parameters + held.gradients + twice + held.optimizer + (activations ?? 0);
      return html("tr", {}, html("th", { scope: "row" }, name),
        [held.parameters, held.gradients, twice, held.optimizer, activations, total].map((size) =>
          html("td", {}, size === null ? "not known" : bytes(size))));
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
      head("method", "parameters", "gradients", "buckets", "optimizer", "activations", "sum"), memory),
      html("p", { class: "note" }, "Four bytes per gradient: fp32 under autocast. Two: ZeRO’s mixed precision. DDP’s buckets hold the gradients again, unless these are views. Activations of the Llama models: with logits and casts, nothing recomputed. Not counted: CUDA’s context, NCCL’s buffers, gaps.")));

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
  showList();
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
