// DDP and ZeRO-1 to 3 through one training step: who holds what, what is sent, and when.

import { badge, button, choice, colourOf, html, mayMove, mount, slider } from "./interactive.js";

export const [RANKS, LAYERS] = [4, 3];
const [FORWARD, BACKWARD, UPDATE] = [1, 2, 1]; // of a layer; the update is that of all layers
const METHODS = new Map([[0, "DDP"], [1, "ZeRO-1"], [2, "ZeRO-2"], [3, "ZeRO-3"]]);
const layers = [...Array(LAYERS).keys()];

/**
 * One step as the operations of two streams, each { stream, kind, layer, pass, start, end }. Time is
 * counted in forwards of a layer; `message` is how long a gather of one takes. `volume` of a message
 * is in parameters of the model, times (N - 1) / N. Messages leave in order, one at a time.
 */
export function plan(stage, { prefetch = false, message = 1 } = {}) {
  const free = { compute: 0, link: 0 };
  const operations = [];
  function run(stream, duration, ready, what) {
    const start = Math.max(free[stream], ready);
    free[stream] = start + duration;
    operations.push({ stream, start, end: free[stream], layer: null, pass: null, volume: 0, ...what });
    return free[stream];
  }
  const send = (kind, layer, ready, pass) => {
    const times = kind === "all-reduce" ? 2 : 1;
    return run("link", times * message, ready, { kind, layer, pass: pass ?? null, volume: times / LAYERS });
  };
  const passes = [...layers.map((layer) => ["forward", layer]), ...[...layers].reverse().map((layer) => ["backward", layer])];
  let gathered = stage === 3 ? send("all-gather", 0, 0, "forward") : 0;
  passes.forEach(([pass, layer], i) => {
    const [next, upcoming] = passes[i + 1] ?? [];
    const ask = (ready) => send("all-gather", upcoming, ready, next);
    const begin = Math.max(free.compute, gathered);
    const early = stage === 3 && prefetch && next && upcoming !== layer;
    const asked = early ? ask(begin) : 0;
    const end = run("compute", pass === "forward" ? FORWARD : BACKWARD, gathered, { kind: pass, layer });
    if (pass === "backward") send(stage ? "reduce-scatter" : "all-reduce", layer, end);
    gathered = stage === 3 && next && !early ? ask(end) : asked;
  });
  const updated = run("compute", stage ? UPDATE / RANKS : UPDATE, free.link, { kind: "update" });
  if (stage === 1 || stage === 2) layers.forEach((layer) => send("all-gather", layer, updated, "update"));
  return operations;
}

/** The moments of a step: its begin, and whenever something ends. */
export const moments = (operations) => [...new Set([0, ...operations.map(({ end }) => end)])].sort((a, b) => a - b);

/**
 * What a rank holds of each layer at a moment. Parameters are "whole", its own "part", "arriving",
 * "gathered" beside the part, or whole but with only its own part "updated". Gradients are "none",
 * "local" while its own alone, "whole" means, "stale" where only its part is the mean, or "part".
 */
export function held(stage, operations, time) {
  const of = (kind, layer = null, pass = null) => operations.find((each) => each.kind === kind && each.layer === layer && each.pass === pass);
  const parameters = layers.map((layer) => {
    if (stage === 3) {
      const here = ["forward", "backward"].find((pass) =>
        of("all-gather", layer, pass).start <= time && time < of(pass, layer).end);
      if (!here) return "part";
      return time < of("all-gather", layer, here).end ? "arriving" : "gathered";
    }
    const sent = of("all-gather", layer, "update");
    return sent && of("update").end <= time && time < sent.end ? "updated" : "whole";
  });
  const gradients = layers.map((layer) => {
    if (time < of("backward", layer).start) return "none";
    if (time < of(stage ? "reduce-scatter" : "all-reduce", layer).end) return "local";
    return ["whole", "stale", "part", "part"][stage];
  });
  return { parameters, gradients, optimizer: layers.map(() => (stage ? "part" : "whole")) };
}

const SHARES = { none: 0, part: 1 / RANKS, arriving: 1 + 1 / RANKS, gathered: 1 + 1 / RANKS };

/** Bytes per parameter on each rank, with Adam in float32. */
export function bytes(holds) {
  const share = (states) => states.reduce((sum, state) => sum + (SHARES[state] ?? 1), 0) / LAYERS;
  const [parameters, gradients, optimizer] = [4 * share(holds.parameters), 4 * share(holds.gradients), 8 * share(holds.optimizer)];
  return { parameters, gradients, optimizer, total: parameters + gradients + optimizer };
}

/** The most that a rank holds at any moment of the step. */
export const peak = (stage, operations) => Math.max(...moments(operations).map((time) => bytes(held(stage, operations, time)).total));

/** What each rank has sent by then, in parameters of the model, times (N - 1) / N. */
export const sent = (operations, time) =>
  operations.reduce((sum, { volume, end }) => sum + (end <= time ? volume : 0), 0);

/** The times in which nothing is computed. */
export function waits(operations) {
  const found = [];
  let end = 0;
  for (const each of operations.filter(({ stream }) => stream === "compute")) {
    if (each.start > end) found.push({ start: end, end: each.start });
    end = each.end;
  }
  const last = moments(operations).at(-1);
  return last > end ? [...found, { start: end, end: last }] : found;
}

/** What has just ended, and what goes on, in words. */
export function words(stage, operations, time) {
  if (time === 0) return stage === 3 ? "The step begins. Each rank has a quarter of every layer, and asks for the rest of layer 0." : "The step begins. Every rank has all parameters.";
  const told = {
    forward: (layer) => `Forward of layer ${layer} is done${stage === 3 ? ", and its parameters are dropped" : ""}.`,
    backward: (layer) => `Backward of layer ${layer} is done: each rank has its own gradient${stage === 3 ? ", and drops the parameters" : ""}.`,
    "all-reduce": (layer) => `The mean of layer ${layer}'s gradients is on every rank.`,
    "reduce-scatter": (layer) => `Each rank has the mean of its quarter of layer ${layer}'s gradient${stage === 1 ? "; the rest stays, of no use." : " and drops the rest."}`,
    "all-gather": (layer) => (stage === 3 ? `Layer ${layer} has arrived: whole on every rank.` : `The updated quarters of layer ${layer} have reached every rank.`),
    update: () => (stage ? "Each rank has updated its own quarter." : "Each rank has updated everything: the same work, four times."),
  };
  const done = operations.filter(({ end }) => end === time).map(({ kind, layer }) => told[kind](layer));
  if (time === moments(operations).at(-1)) return `${done.join(" ")} The step is over.`;
  const busy = operations.some(({ stream, start, end }) => stream === "compute" && start <= time && time < end);
  return `${done.join(" ")}${busy ? "" : " Compute waits."}`;
}

// The page ------------------------------------------------------------------------------------

const short = (value) => String(Number(value.toFixed(2)));
const WORDS = { none: "nothing", part: "own quarter", arriving: "own quarter, the rest arriving", gathered: "whole for now", local: "its own, whole", whole: "whole", stale: "own quarter is the mean, the rest of no use", updated: "whole, own quarter updated" };

function build() {
  let [stage, prefetch, message, now, timer] = [3, false, 1, 0, null];
  let [operations, times] = [[], []];
  const body = html("tbody", {});
  const strips = { compute: html("div", { class: "strip" }), link: html("div", { class: "strip" }) };
  const cursor = html("i", { class: "cursor" });
  const says = html("p", { class: "says", role: "status" });
  const numbers = html("dl", {});

  const cell = (state, rank) => html("i", { class: `cell ${state}` },
    [...Array(RANKS).keys()].map((part) => html("b", { class: part === rank ? "mine" : "", style: { "--rank": colourOf(part) } })));

  const row = (name, states, size) => html("tr", {}, html("th", { scope: "row" }, name, html("small", {}, `${short(size)} B`)), [...Array(RANKS).keys()].map((rank) =>
    html("td", { style: { "--rank": colourOf(rank) } },
      html("span", { class: "visually-hidden" }, states.map((state, layer) => `layer ${layer}: ${WORDS[state]}`).join("; ")),
      html("span", { class: "cells", "aria-hidden": "true" }, states.map((state) => cell(state, rank))))));

  function bars() {
    const last = times.at(-1);
    const place = (name, { start, end }, text = "") => html("span", { class: name, style: { left: `${(100 * start) / last}%`, width: `${(100 * (end - start)) / last}%` } }, text);
    const letter = { forward: "f", backward: "b" };
    strips.compute.replaceChildren(...operations.filter(({ stream }) => stream === "compute").map((each) =>
      place("pass", each, each.kind === "update" ? "" : `${letter[each.kind]}${each.layer}`)), ...waits(operations).map((gap) => place("waits", gap)));
    strips.link.replaceChildren(...operations.filter(({ stream }) => stream === "link").map((each) =>
      place(`message ${each.kind}`, each, `${each.kind === "all-gather" ? "g" : "r"}${each.layer}`)), cursor);
  }

  function draw(forward) {
    const time = times[now];
    const holds = held(stage, operations, time);
    const [size, all] = [bytes(holds), sent(operations, times.at(-1))];
    const idle = waits(operations).reduce((sum, { start, end }) => sum + end - start, 0);
    body.replaceChildren(...[["parameters", "parameters"], ["gradients", "gradients"], ["Adam", "optimizer"]].map(([name, part]) => row(name, holds[part], size[part])));
    cursor.style.left = `${(100 * time) / times.at(-1)}%`;
    says.textContent = words(stage, operations, time);
    numbers.replaceChildren(...[["Bytes per parameter", short(size.total)], ["Most in this step", short(peak(stage, operations))],
      ["Sent by each rank", `${short(sent(operations, time))} of ${short(all)} Ψ`], ["Compute waits", `${short(idle)} of ${short(times.at(-1))}`],
    ].map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))));
    place.set(now);
    [back.disabled, next.disabled] = [now === 0, now === times.length - 1];
    if (forward && mayMove()) fly(time);
  }

  // Each quarter of a layer that has just arrived comes from the column of the rank that owns it.
  function fly(time) {
    for (const { layer } of operations.filter(({ kind, end }) => kind === "all-gather" && end === time)) {
      const columns = [...body.rows[0].cells].slice(1);
      const stride = columns[1].offsetLeft - columns[0].offsetLeft;
      columns.forEach((column, rank) => column.querySelectorAll(".cell")[layer].querySelectorAll("b").forEach((quarter, owner) =>
        owner === rank || quarter.animate([{ transform: `translateX(${(owner - rank) * stride}px)` }, { transform: "none" }], { duration: 600, easing: "ease-out" })));
    }
  }

  function go(moment, forward = false) {
    if (moment < 0 || moment >= times.length) return;
    now = moment;
    draw(forward);
  }

  function again() {
    stop();
    operations = plan(stage, { prefetch, message });
    times = moments(operations);
    place.range.max = times.length - 1;
    prefetches.disabled = stage !== 3;
    bars();
    go(0);
  }

  function play() {
    says.setAttribute("aria-live", "off"); // too fast to be read aloud
    playing.textContent = "Pause";
    const advance = () => {
      go(now + 1, true);
      if (now === times.length - 1) stop();
      else timer = setTimeout(advance, 1300);
    };
    if (now === times.length - 1) go(0);
    timer = setTimeout(advance, 0);
  }

  function stop() {
    clearTimeout(timer);
    timer = null;
    says.removeAttribute("aria-live");
    playing.textContent = "Play";
  }

  const place = slider("Moment:", { min: 0, max: 1, value: 0, show: (value) => `${value} of ${times.length - 1}` }, (moment) => stop() || go(moment));
  const back = button("One moment back", "◀", () => stop() || go(now - 1));
  const playing = html("button", { type: "button", class: "main", click: () => (timer ? stop() : play()) });
  const next = button("One moment forward", "▶", () => stop() || go(now + 1, true));
  const prefetches = choice("Prefetch", new Map([[false, "off"], [true, "on"]]), prefetch, (on) => { prefetch = on; again(); });

  const stream = (name, strip) => html("div", { class: "stream" }, html("span", {}, name), strip);
  const widget = html("div", { class: "widget zero-stepper", keydown: (event) => {
    if (event.target.matches("input")) return;
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: times.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    stop();
    go(to, event.key === "ArrowRight");
  } },
    html("div", { class: "controls" },
      choice("Method", METHODS, stage, (chosen) => { stage = chosen; again(); }), prefetches,
      slider("A gather takes", { min: 0.5, max: 3, step: 0.5, value: message, show: (value) => `${value} forward${value === 1 ? "" : "s"}` },
        (value) => { message = value; again(); })),
    html("div", { class: "picture" },
      html("table", {}, html("caption", { class: "visually-hidden" }, "What each rank holds of the three layers"),
        html("thead", {}, html("tr", {}, html("td", {}), [...Array(RANKS).keys()].map((rank) => html("th", { scope: "col", "aria-label": `rank ${rank}` }, badge(rank))))), body),
      html("div", { class: "streams", "aria-hidden": "true" }, stream("compute", strips.compute), stream("link", strips.link)),
      html("p", { class: "note" }, "f, b: forward, backward of a layer, then the update · g: all-gather · r: reduce · dashed: parameters arrive · hatched: compute waits")),
    says, html("div", { class: "readout" }, numbers),
    html("div", { class: "controls" }, html("div", { class: "buttons" }, back, playing, next), place));
  again();
  return widget;
}

mount("zero-stepper", build);
