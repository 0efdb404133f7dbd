// Data parallel training in the page: four ranks, each a web worker, average gradients in a ring.

import { badge, button, choice, colourOf, html, mount, svg } from "./interactive.js";
import { initialWeights, lossAndGradient, parts, spirals } from "./spirals.js";

const [RANKS, SAMPLES, STEPS, EVERY] = [4, 256, 1500, 10];
const STOPS_AFTER = 400;
const PATIENCE = 1500; // milliseconds without news, until the page says that the ranks wait

// Training ------------------------------------------------------------------------------------

/**
 * Starts the ranks; `report({ rank, step, weights })` hears from each in every `every` steps, and
 * rank "alone" is one process with all samples. `fault` is what is broken, if anything. Returns
 * what stops them all; `fail` hears that workers cannot be started.
 */
export function start({ ranks = RANKS, samples = SAMPLES, steps = STEPS, every = EVERY, fault = "none" }, report, fail) {
  const all = spirals(samples);
  const shares = parts(all, ranks, fault === "parts");
  const links = shares.map(() => new MessageChannel()); // link r: from rank r to its right
  const common = { steps, every, sync: fault !== "sync", ownOrder: fault === "order" };
  const jobs = shares.map((share, rank) => ({
    ...common, rank, size: ranks, samples: share,
    ports: [links[(rank + ranks - 1) % ranks].port2, links[rank].port1],
    weights: initialWeights(fault === "start" ? 2 + rank : 2),
    delay: fault === "slow" && rank === ranks - 1 ? 4 : 0,
    last: fault === "stop" && rank === ranks - 1 ? STOPS_AFTER : steps,
  }));
  jobs.push({ ...common, rank: "alone", size: 1, samples: all, weights: initialWeights(2), last: steps });
  const workers = jobs.map((job) => {
    const worker = new Worker(new URL("./rank.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => report(data);
    worker.onerror = fail;
    worker.postMessage(job, job.ports ?? []);
    return worker;
  });
  return () => workers.forEach((worker) => worker.terminate());
}

/** The weights of every rank after the last step, and those of one process. */
export function train(options) {
  return new Promise((resolve, reject) => {
    const found = {};
    const stop = start({ ...options, every: options.steps }, ({ rank, weights }) => {
      found[rank] = [...weights];
      if (Object.keys(found).length < options.ranks + 1) return;
      stop();
      resolve(found);
    }, reject);
  });
}

/** The largest difference between the weights of two replicas. */
export const distance = (replicas) =>
  Math.max(...replicas[0].map((_, i) => {
    const same = replicas.map((weights) => weights[i]);
    return Math.max(...same) - Math.min(...same);
  }));

// The page ------------------------------------------------------------------------------------

const FAULTS = new Map([
  ["none", "nothing"], ["sync", "no all-reduce"], ["parts", "unequal parts"],
  ["start", "other starting weights"], ["order", "own order of adding"], ["slow", "a slow rank"], ["stop", "a rank that stops"],
]);

const PLOT = { left: 40, right: 430, top: 14, bottom: 150 };
const across = (step) => PLOT.left + ((PLOT.right - PLOT.left) * step) / STEPS;
const lossAt = (loss) => PLOT.bottom - ((PLOT.bottom - PLOT.top) * Math.min(loss, 0.8)) / 0.8;
const [GAP_TOP, GAP_BOTTOM] = [186, 270];
/** A logarithmic axis from 1e-17 to 10; what is equal to the bit lies on its floor. */
const gapAt = (gap) => GAP_BOTTOM - (GAP_BOTTOM - GAP_TOP) * Math.max(0, Math.min(1, (Math.log10(gap || 1e-18) + 17) / 18));

const names = [...Array(RANKS).keys(), "alone"];

/** The loss before the first step and after every fiftieth, with nothing broken. */
export const EXAMPLE = [
  0.699, 0.659, 0.656, 0.644, 0.57, 0.533, 0.452, 0.316, 0.162, 0.089, 0.065, 0.05, 0.041, 0.035, 0.03, 0.026,
  0.023, 0.021, 0.018, 0.016, 0.014, 0.012, 0.011, 0.009, 0.007, 0.006, 0.005, 0.004, 0.004, 0.004, 0.003,
];
const APART = STEPS / (EXAMPLE.length - 1);

/** That run, drawn faintly, so that there is something to compare one's own with. */
const example = () => [
  svg("path", { class: "example", d: `M${EXAMPLE.map((loss, i) => `${across(i * APART).toFixed(1)},${lossAt(loss).toFixed(1)}`).join(" ")}` }),
  svg("path", { class: "example", d: `M${PLOT.left} ${GAP_BOTTOM}H${PLOT.right}` }),
  svg("text", { class: "label", x: across(480), y: lossAt(0.17) }, "example: a run with nothing broken"),
  svg("text", { class: "label", x: across(480), y: GAP_BOTTOM - 8 }, "example: equal to the last bit"),
];

/** Each rank's dashes are shorter than those below, so that four colours show where curves coincide. */
const dashes = (rank) => `${24 - 6 * rank} ${6 * rank}`;

function plot() {
  const lines = new Map(names.map((name) => [name, svg("polyline", name === "alone"
    ? { class: "alone" } : { class: "curve", "stroke-dasharray": dashes(name), style: { "--rank": colourOf(name) } })]));
  const gap = svg("polyline", { class: "gap" });
  const axis = (y, text) => [
    svg("line", { class: "gridline", x1: PLOT.left, x2: PLOT.right, y1: y, y2: y }),
    svg("text", { x: PLOT.left - 5, y: y + 4, "text-anchor": "end" }, text)];
  const picture = svg("svg", { class: "plot", viewBox: "0 0 440 290", role: "img", "aria-label":
    "Above, the loss of each rank's replica and of one process over the steps. Below, the largest difference between two replicas. Pale, an example with nothing broken: the loss falls close to 0, and the difference is 0." },
    svg("text", { x: 2, y: 10 }, "loss on all samples"),
    axis(lossAt(0), "0"), axis(lossAt(0.35), "0.35"), axis(lossAt(0.7), "0.7"),
    svg("text", { x: 2, y: 176 }, "largest difference between two replicas (logarithmic)"),
    axis(gapAt(1), "1"), axis(gapAt(1e-8), "1e-8"), axis(GAP_BOTTOM, "0"),
    [0, 500, 1000, 1500].map((step) => svg("text", { x: across(step), y: 286, "text-anchor": step === STEPS ? "end" : "middle" }, step ? step : "step 0")),
    example(), lines.get("alone"), names.slice(0, -1).map((name) => lines.get(name)), gap);
  const add = (line, x, y) => line.setAttribute("points", `${line.getAttribute("points") ?? ""} ${x.toFixed(1)},${y.toFixed(1)}`);
  return {
    picture,
    clear: () => [...lines.values(), gap].forEach((line) => line.setAttribute("points", "")),
    label: (shown) => picture.classList.toggle("labelled", shown),
    loss: (name, step, value) => add(lines.get(name), across(step), lossAt(value)),
    gap: (step, value) => {
      gap.classList.toggle("equal", value === 0);
      add(gap, across(step), gapAt(value));
    },
  };
}

/** What has happened, in words. `losses` are the last ones by name, `gap` the last distance. */
export function verdict(fault, { losses, gap, step }) {
  const number = (value) => value.toFixed(3);
  const mine = names.slice(0, -1).map((rank) => losses[rank]);
  const one = `One process with all the samples has ${number(losses.alone ?? NaN)}.`;
  if (fault === "stop") {
    return `Rank ${RANKS - 1} stopped after step ${STOPS_AFTER}. The others have waited for its gradients since then: `
      + "nothing here tells them whether it is late or gone.";
  }
  const equal = gap === 0 ? "the four replicas are equal to the bit" : `two replicas differ by up to ${gap.toPrecision(1)}`;
  const said = {
    none: `Their loss is ${number(mine[0])}. ${one}`,
    slow: `Their loss is ${number(mine[0])}, as without the slow rank: all four trained at its pace.`,
    sync: `Nobody averaged: four different models have losses from ${number(Math.min(...mine))} to ${number(Math.max(...mine))}. ${one}`,
    parts: `Their loss is ${number(mine[0])}. ${one} The mean of the ranks' means is not the mean of all samples: eight samples of a small part count as much as the ${SAMPLES - 8 * (RANKS - 1)} of rank 0.`,
    order: `Their loss is ${number(mine[0])}. Each rank added the same four gradients, its own first: the sums differ in their last bits, and these differences stay.`,
    start: `The gradients were averaged, so all moved alike, and the difference from the start never closed: losses from ${number(Math.min(...mine))} to ${number(Math.max(...mine))}. ${one}`,
  };
  return `After ${step.toLocaleString("en")} steps ${equal}. ${said[fault]}`;
}

function build(data) {
  const all = spirals(SAMPLES);
  const { picture, clear, label, loss, gap } = plot();
  let [fault, stop, waiting, seen] = [data?.fault ?? "none", null, null, null];
  const invite = () => (fault === "none"
    ? "Predict whether your run will draw these pale curves again, then run."
    : `The pale curves are a run with nothing broken. Predict what “${FAULTS.get(fault)}” does to them, then run.`);
  const says = html("p", { class: "says", role: "status" }, invite());
  label(true);

  function end(text) {
    clearTimeout(waiting);
    stop?.();
    stop = null;
    run.textContent = "Run";
    if (text) says.textContent = text;
  }

  function hear({ rank, step, weights }) {
    seen.losses[rank] = lossAndGradient(weights, all).loss;
    loss(rank, step, seen.losses[rank]);
    if (rank !== "alone") {
      const replicas = seen.weights.get(step) ?? [];
      seen.weights.set(step, [...replicas, weights]);
      if (replicas.length + 1 === RANKS) {
        [seen.gap, seen.step] = [distance(seen.weights.get(step)), step];
        gap(step, seen.gap);
        seen.weights.delete(step);
      }
    }
    if (step === STEPS) seen.ended += 1;
    if (seen.ended === RANKS + 1) end(verdict(fault, seen));
    else if (fault === "stop") {
      clearTimeout(waiting);
      waiting = setTimeout(() => (says.textContent = verdict(fault, seen)), PATIENCE);
    }
  }

  function click() {
    if (stop) return end("Stopped.");
    clear();
    label(false);
    seen = { losses: {}, weights: new Map(), gap: 0, step: 0, ended: 0 };
    says.textContent = "Four ranks and one process are training.";
    run.textContent = "Stop";
    try {
      stop = start({ fault }, hear, () => end("This browser starts no workers here. Open the page from a web server."));
    } catch {
      end("This browser starts no workers here. Open the page from a web server.");
    }
  }

  const run = button("Run or stop the training", "Run", click);
  run.className = "main";
  const widget = html("div", { class: "widget data-parallel" },
    html("div", { class: "controls" },
      choice("Break", FAULTS, fault, (value) => {
        fault = value;
        end(invite());
        clear();
        label(true);
      }),
      html("span", { class: "buttons" }, run)),
    html("div", { class: "picture" }, picture,
      html("p", { class: "legend" }, names.slice(0, -1).map((rank) => [badge(rank), " "]),
        "the ranks with their parts; ", html("span", { class: "dash" }), " one process with all samples; ",
        html("span", { class: "pale" }), " an example")),
    says);
  return widget;
}

mount("data-parallel", build);
