// The scaling calculator: what a step of DDP takes on N ranks, by the models of instruments.cost,
// instruments.overlap and instruments.memory.

import { bytes, choice, html, mount, number, percent, plural, seconds, slider, svg } from "./interactive.js";

const MIB = 2 ** 20;
const FORWARD = 1 / 3; // of the compute: 2 FLOPs per parameter and token, backward takes 4
const MOST_BUCKETS = 5000;

// instruments.cost --------------------------------------------------------------------------------

/** 2 (N − 1) α + 2 (N − 1)/N S β seconds. A link is { alpha, beta }. */
export const ringAllReduceSeconds = (size, worldSize, { alpha, beta }) =>
  2 * ((worldSize - 1) * alpha + ((size * (worldSize - 1)) / worldSize) * beta);

/** Reduce-scatter within nodes, all-reduce of each part between nodes, all-gather within nodes. */
export const hierarchicalAllReduceSeconds = (size, ranksPerNode, nodes, intra, inter) =>
  ringAllReduceSeconds(size, ranksPerNode, intra) + ringAllReduceSeconds(size / ranksPerNode, nodes, inter);

// miniddp.bucket and instruments.overlap ----------------------------------------------------------

/** Bytes of the buckets: the first is small, so that communication starts early. */
export function bucketBytes(total, cap, firstCap) {
  const first = Math.min(total, firstCap, cap);
  const rest = total - first;
  const full = Math.floor(rest / cap);
  const sizes = [first, ...Array(full).fill(cap)];
  return rest > full * cap ? [...sizes, rest - full * cap] : sizes;
}

/** When the buckets are ready if backward produces as many bytes in every second. */
export function readyTimes(sizes, backward) {
  const total = sizes.reduce((sum, size) => sum + size, 0);
  let done = 0;
  return sizes.map((size) => {
    done += size;
    return backward * Math.min(1, done / total);
  });
}

/** All-reduces one at a time: each starts when its bucket is ready and the one before it is done. */
export function overlap(ready, durations, backward) {
  let free = 0;
  const starts = [];
  const ends = durations.map((duration, i) => {
    starts.push(Math.max(ready[i], free));
    free = starts[i] + duration;
    return free;
  });
  return { starts, ends, exposed: Math.max(0, free - backward) };
}

// instruments.memory ------------------------------------------------------------------------------

/** Bytes per parameter with Adam: all in fp32, or ZeRO's mixed precision. */
export const bytesPerParameter = (gradientBytes) =>
  gradientBytes === 4 ? { parameters: 4, gradients: 4, optimizer: 8 } : { parameters: 2, gradients: 2, optimizer: 12 };

/** Bytes on one rank. Stage 0 is DDP; 1 shards the optimizer's state, 2 gradients too, 3 all. */
export function memoryPerRank(parameterCount, worldSize, stage, each) {
  const shard = Math.ceil(parameterCount / worldSize);
  const of = (name, from) => each[name] * (stage >= from ? shard : parameterCount);
  return { parameters: of("parameters", 3), gradients: of("gradients", 2), optimizer: of("optimizer", 1) };
}

// A step --------------------------------------------------------------------------------------

/** Seconds of forward and backward of a micro-batch: 6 FLOPs per parameter and token. */
export const computeSeconds = ({ parameters, tokens, peak, utilisation }) =>
  (6 * parameters * tokens) / (peak * utilisation);

/**
 * A step on `worldSize` ranks. `inputs`: parameters, gradientBytes, compute (seconds of a
 * micro-batch), accumulation, bucketCap and firstCap (bytes), ranksPerNode, intra (a link), inter
 * (a link; its beta is that of the node's network, which the ranks of the node share).
 */
export function step(inputs, worldSize) {
  const { ranksPerNode, intra, inter } = inputs;
  const nodes = worldSize / ranksPerNode;
  const shared = { alpha: inter.alpha, beta: inter.beta * ranksPerNode };
  const allReduce = (size) => (nodes <= 1
    ? ringAllReduceSeconds(size, worldSize, intra)
    : hierarchicalAllReduceSeconds(size, ranksPerNode, nodes, intra, shared));
  const sizes = bucketBytes(inputs.parameters * inputs.gradientBytes, inputs.bucketCap, inputs.firstCap);
  const durations = sizes.map(allReduce);
  const backward = inputs.compute * (1 - FORWARD);
  const sent = overlap(readyTimes(sizes, backward), durations, backward);
  const compute = inputs.compute * inputs.accumulation;
  const total = compute + sent.exposed;
  return {
    sizes, ...sent, backward, compute, seconds: total,
    communication: durations.reduce((sum, duration) => sum + duration, 0),
    efficiency: compute / total,
    speedup: (worldSize * compute) / total,
  };
}

/** The numbers of ranks that fill their nodes: 1, 2, 4 … to one node, then whole nodes. */
export function worldSizes(ranksPerNode, most = 1024) {
  const sizes = [];
  for (let ranks = 1; ranks < ranksPerNode; ranks *= 2) sizes.push(ranks);
  for (let ranks = ranksPerNode; ranks <= most; ranks *= 2) sizes.push(ranks);
  return sizes;
}

// The page ------------------------------------------------------------------------------------

const NVIDIA = "https://www.nvidia.com/en-us/data-center";
const gigabytes = (amount) => 1 / (amount * 1e9);

// GB/s in one direction. The data sheets give both directions together.
const WITHIN = [
  { name: "NVLink 4 (H100 SXM)", rate: 450, source: ["NVIDIA H100", `${NVIDIA}/h100/`, "900 GB/s, both directions together"] },
  { name: "NVLink 3 (A100 SXM)", rate: 300, source: ["NVIDIA A100", `${NVIDIA}/a100/`, "600 GB/s, both directions together"] },
  { name: "PCIe 5.0 x16", rate: 64, source: ["NVIDIA H100", `${NVIDIA}/h100/`, "128 GB/s, both directions together"] },
  { name: "PCIe 4.0 x16", rate: 32, source: ["NVIDIA A100", `${NVIDIA}/a100/`, "64 GB/s, both directions together"] },
];
const BETWEEN = [
  { name: "8 × 400 Gb/s InfiniBand", rate: 400 },
  { name: "8 × 200 Gb/s InfiniBand", rate: 200 },
  { name: "1 × 100 Gb/s Ethernet", rate: 12.5 },
  { name: "1 × 25 Gb/s Ethernet", rate: 3.125 },
  { name: "1 × 10 Gb/s Ethernet", rate: 1.25 },
];

const rounded = (value) => Number(value.toPrecision(4));
const ratio = (value) => `${Number(value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0))}`;

function recordedLinks(data) {
  return data.filter(({ values }) => "alpha" in values && "beta" in values)
    .map(({ kind, values }) => ({ name: `as recorded (${kind.toUpperCase()})`, alpha: values.alpha, beta: values.beta }));
}

function build(data) {
  const recorded = data?.[0]?.values ?? {};
  const within = [...recordedLinks(data ?? []), ...WITHIN];
  const start = within[0].beta ? within[0] : WITHIN[3];
  const inputs = {
    parameters: recorded.parameters ?? 360e6,
    gradientBytes: recorded.gradient_bytes ?? 4,
    compute: recorded.compute_seconds ?? 0.25,
    accumulation: 1,
    bucketCap: 25 * MIB,
    firstCap: MIB,
    ranksPerNode: 8,
    intra: { alpha: start.alpha ?? 10e-6, beta: start.beta ?? gigabytes(start.rate) },
    inter: { alpha: 20e-6, beta: gigabytes(BETWEEN[2].rate) },
  };
  const flops = { tokens: 8192, peak: 989e12, utilisation: 0.4 };
  let byFlops = false;
  let position = 4;

  const sizesNow = () => worldSizes(inputs.ranksPerNode);
  const worldSize = () => sizesNow()[Math.min(position, sizesNow().length - 1)];
  const change = (name) => (value) => {
    inputs[name] = value;
    draw();
  };

  // Inputs --------------------------------------------------------------------------------------

  const field = (label, unit, value, factor, bounds, set) =>
    number(label, { ...bounds, unit, value: rounded(value / factor) }, (typed) => {
      set(typed * factor);
      draw();
    });

  const time = field("Compute per micro-batch", "ms", inputs.compute, 1e-3, { min: 0.001, max: 1e7 }, (value) => {
    inputs.compute = value;
  });
  const fromFlops = html("div", { class: "group", hidden: true },
    field("Tokens per micro-batch", "", flops.tokens, 1, { min: 1, max: 1e9 }, (value) => { flops.tokens = value; }),
    field("Peak", "TFLOP/s", flops.peak, 1e12, { min: 0.001, max: 1e6 }, (value) => { flops.peak = value; }),
    field("Reached", "%", flops.utilisation, 0.01, { min: 0.1, max: 100 }, (value) => { flops.utilisation = value; }),
    html("p", { class: "note" }, "6 FLOPs per parameter and token. The peak is bf16 without sparsity on an ", html("a", { href: `${NVIDIA}/h100/` }, "NVIDIA H100"), "; what is reached is an assumption."));

  function linkFields(title, presets, chosen, link, note) {
    const rate = field("Bandwidth", "GB/s", 1 / link.beta, 1e9, { min: 1e-4, max: 1e5 }, (value) => {
      link.beta = 1 / value;
      select.value = "";
      say(null);
    });
    const latency = field("Latency", "µs", link.alpha, 1e-6, { min: 0, max: 1e7 }, (value) => {
      link.alpha = value;
    });
    const source = html("p", { class: "note" });
    const say = (preset) => source.replaceChildren(...(!preset ? ["Your own number."]
      : preset.source ? [`${preset.rate} GB/s in one direction: `, html("a", { href: preset.source[1] }, preset.source[0]), `, ${preset.source[2]}.`]
        : preset.beta ? ["Fitted in the run below."]
          : [`${preset.rate} GB/s per node: the rate in its name.`]),
      ` ${note}`, preset?.alpha === undefined ? " The latency is an assumption." : "");
    const select = html("select", {
      change: () => {
        const preset = presets[Number(select.value)];
        link.beta = preset.beta ?? gigabytes(preset.rate);
        rate.box.value = rounded(1e-9 / link.beta);
        if (preset.alpha !== undefined) {
          link.alpha = preset.alpha;
          latency.box.value = rounded(link.alpha / 1e-6);
        }
        say(preset);
        draw();
      },
    }, html("option", { value: "", hidden: true }, "your own"), presets.map((preset, i) =>
      html("option", { value: String(i), selected: preset === chosen }, preset.name)));
    say(chosen);
    return html("fieldset", { class: "group link" }, html("legend", {}, title),
      html("label", { class: "select" }, html("span", {}, "Preset"), select), rate, latency, source);
  }

  const ranks = slider("Ranks", { min: 0, max: sizesNow().length - 1, value: position, show: (value) => String(sizesNow()[value] ?? 0) }, (value) => {
    position = value;
    draw();
  });

  const controls = html("div", { class: "controls" },
    html("div", { class: "group" },
      field("Parameters", "million", inputs.parameters, 1e6, { min: 0.001, max: 1e7 }, (value) => { inputs.parameters = Math.round(value); }),
      choice("Bytes per gradient", new Map([[4, "4"], [2, "2"]]), inputs.gradientBytes, change("gradientBytes")),
      choice("Compute", new Map([[false, "by time"], [true, "by FLOPs"]]), byFlops, (value) => {
        byFlops = value;
        time.hidden = value;
        fromFlops.hidden = !value;
        draw();
      }),
      time, fromFlops),
    linkFields("Within a node", within, start, inputs.intra, ""),
    linkFields("Between nodes", BETWEEN, BETWEEN[2], inputs.inter, "The ranks of a node share it."),
    html("div", { class: "group" },
      choice("Ranks per node", new Map([[1, "1"], [2, "2"], [4, "4"], [8, "8"]]), inputs.ranksPerNode, (value) => {
        const before = worldSize();
        inputs.ranksPerNode = value;
        position = Math.max(0, sizesNow().indexOf(before));
        ranks.range.max = sizesNow().length - 1;
        draw();
      }),
      field("Bucket", "MiB", inputs.bucketCap, MIB, { min: 0.01, max: 1e6 }, (value) => { inputs.bucketCap = inputs.firstCap = value; }),
      number("Micro-batches per step", { min: 1, max: 1000, step: 1, value: 1 }, change("accumulation"))));

  // Outputs -------------------------------------------------------------------------------------

  const results = html("dl", { class: "results" });
  const status = html("p", { class: "visually-hidden", role: "status" });
  const lanes = html("div", { class: "lanes" });
  const curve = html("div", { class: "curve" });
  const table = html("tbody");
  const memory = html("tbody");
  const problem = html("p", { class: "problem", role: "alert", hidden: true });

  function draw() {
    if (byFlops) inputs.compute = computeSeconds({ ...flops, parameters: inputs.parameters });
    ranks.set(Math.min(position, sizesNow().length - 1));
    const buckets = (inputs.parameters * inputs.gradientBytes) / inputs.bucketCap;
    problem.hidden = buckets <= MOST_BUCKETS;
    outputs.hidden = !problem.hidden;
    if (!problem.hidden) {
      problem.textContent = `That makes ${Math.ceil(buckets).toLocaleString("en")} buckets: choose a larger one.`;
      return;
    }
    const n = worldSize();
    const now = step(inputs, n);
    showResults(now, n);
    showStep(now);
    const all = sizesNow().map((size) => [size, step(inputs, size)]);
    showCurve(all, n);
    table.replaceChildren(...all.map(([size, each]) => html("tr", { class: size === n && "chosen" },
      html("th", { scope: "row" }, String(size)),
      [seconds(each.communication), seconds(each.exposed), seconds(each.seconds), percent(each.efficiency), ratio(each.speedup)]
        .map((text) => html("td", {}, text)))));
    showMemory(n);
  }

  function showResults(now, n) {
    const entries = [
      ["step", seconds(now.seconds), `${seconds(now.compute)} computing`],
      ["communication", seconds(now.communication), `${plural(now.sizes.length, "bucket")}, ${bytes(inputs.parameters * inputs.gradientBytes)}`],
      ["of it exposed", seconds(now.exposed), now.communication > 0 ? `${percent(1 - now.exposed / now.communication)} hidden behind backward` : "nothing to send"],
      ["scaling efficiency", percent(now.efficiency), `${ratio(now.speedup)} times one rank, of ${n}`],
    ];
    status.textContent = `${plural(n, "rank")}: step ${seconds(now.seconds)}, efficiency ${percent(now.efficiency)}`;
    results.replaceChildren(...entries.map(([what, value, note]) =>
      html("div", {}, html("dt", {}, what), html("dd", { class: "large" }, value), html("dd", { class: "note" }, note))));
  }

  function showStep(now) {
    const whole = now.seconds;
    const begin = now.compute - now.backward; // of the last backward
    const span = (name, from, till, text) => html("span", {
      class: name, style: { left: `${(100 * from) / whole}%`, width: `${(100 * (till - from)) / whole}%` },
    }, text);
    const forward = begin - inputs.compute * FORWARD;
    const pixels = (lanes.clientWidth - 80) / whole; // per second
    const wide = (from, till, text) => ((till - from) * pixels > 8 * text.length ? text : "");
    const bars = now.starts.length <= 300 ? now.starts.map((start, i) => [start, now.ends[i]]) : [[now.starts[0], now.ends.at(-1)]];
    lanes.replaceChildren(
      html("div", { class: "lane" }, html("span", { class: "name" }, "compute"), html("div", { class: "track" },
        forward > 1e-12 && span("segment earlier", 0, forward, wide(0, forward, `${plural(inputs.accumulation - 1, "micro-batch").replace("batchs", "batches")}`)),
        span("segment", Math.max(0, forward), begin, wide(forward, begin, "forward")),
        span("segment", begin, now.compute, wide(begin, now.compute, "backward")),
        now.exposed > 0 && span("waiting", now.compute, whole, wide(now.compute, whole, "waits")))),
      html("div", { class: "lane" }, html("span", { class: "name" }, "links"), html("div", { class: "track" },
        now.communication > 0 && bars.map(([from, till]) => span("bar", begin + from, begin + till)))));
  }

  function showCurve(all, n) {
    const width = Math.max(240, curve.clientWidth || 700);
    const height = 250;
    const [left, right, top, bottom] = [46, width - 24, 12, height - 34];
    const most = Math.log2(all.at(-1)[0]) || 1;
    const x = (ranks) => left + ((right - left) * Math.log2(ranks)) / most;
    const lowest = Math.min(0, ...all.map(([, each]) => Math.log2(each.speedup)));
    const y = (speedup) => bottom - ((bottom - top) * (Math.log2(speedup) - lowest)) / (most - lowest);
    const [, chosen] = all.find(([size]) => size === n);
    const every = width < 480 ? 2 : 1;
    const line = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    const label = (attributes, text) => svg("text", attributes, text);
    const node = inputs.ranksPerNode;
    curve.replaceChildren(svg("svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
      "aria-label": `Speed-up against the number of ranks: ${ratio(chosen.speedup)} on ${plural(n, "rank")}, ` +
        `${ratio(all.at(-1)[1].speedup)} on ${all.at(-1)[0]}. The table below has every number.`,
    },
      all.filter((_, i) => i % every === 0).map(([size]) => [
        svg("path", { class: "gridline", d: `M${x(size)} ${top}V${bottom}` }),
        svg("path", { class: "gridline", d: `M${left} ${y(size)}H${right}` }),
        label({ x: x(size), y: bottom + 17, "text-anchor": "middle" }, String(size)),
        label({ x: left - 8, y: y(size) + 4, "text-anchor": "end" }, String(size)),
      ]),
      label({ x: right + 12, y: height - 3, "text-anchor": "end" }, "ranks"),
      label({ x: left + 8, y: top + 10 }, "speed-up"),
      node > 1 && svg("path", { class: "node", d: `M${x(node)} ${top}V${bottom}` }),
      node > 1 && width > 480 && label({ x: x(node) + 6, y: top + 26 }, "more than one node"),
      svg("path", { class: "ideal", d: line([[1, 1], [all.at(-1)[0], all.at(-1)[0]]]) }),
      svg("path", { class: "reached", d: line(all.map(([size, each]) => [size, each.speedup])) }),
      all.filter(([size], i) => size > 1 && (all.length - 1 - i) % every === 0).map(([size, each]) =>
        label({ class: "share", x: x(size) + 4, y: y(each.speedup) + (y(each.speedup) > bottom - 28 ? -10 : 19), "text-anchor": "middle" }, percent(each.efficiency).replace(/\.\d/, ""))),
      all.map(([size, each]) => svg("circle", { class: size === n ? "chosen" : "point", cx: x(size), cy: y(each.speedup), r: size === n ? 6 : 3 }))));
  }

  function showMemory(n) {
    const each = bytesPerParameter(inputs.gradientBytes);
    memory.replaceChildren(...["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"].map((name, stage) => {
      const held = memoryPerRank(inputs.parameters, n, stage, each);
      const total = held.parameters + held.gradients + held.optimizer;
      return html("tr", {}, html("th", { scope: "row" }, name),
        [held.parameters, held.gradients, held.optimizer, total].map((size) => html("td", {}, bytes(size))));
    }));
  }

  const head = (...names) => html("thead", {}, html("tr", {}, names.map((name) => html("th", { scope: "col" }, name))));
  const outputs = html("div", { class: "outputs" },
    status, results, lanes, curve,
    html("details", {}, html("summary", {}, "Every number of ranks"), html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Every number of ranks" }, html("table", {},
      head("ranks", "communication", "exposed", "step", "efficiency", "speed-up"), table))),
    html("details", {}, html("summary", {}, "Memory per rank, with Adam"), html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Memory per rank" }, html("table", {},
      head("method", "parameters", "gradients", "optimizer", "sum"), memory)),
      html("p", { class: "note" }, "Four bytes per gradient: all in fp32. Two: ZeRO’s mixed precision. Without activations.")));
  const widget = html("div", { class: "widget scaling-calculator" }, controls, html("div", { class: "controls" }, ranks), problem, outputs);
  new ResizeObserver(() => draw()).observe(curve);
  draw();
  return widget;
}

mount("scaling-calculator", build);
