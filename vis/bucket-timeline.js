// The bucket timeline: one recorded backward pass, what was computed, what was sent meanwhile. And
// a tuner: the same for a larger model, computed by instruments.simulator for any buckets and link.

import { binaryBytes, choice, colourOf, html, mount, number, percent, plural, seconds, slider, tick } from "./interactive.js";
import { measuredSeconds, volume } from "./network.js";
import { ALL_REDUCE } from "./published.js";
import { MIB, buckets, gradientBytes, llamaLayers, simulate } from "./simulator.js";
import { inner, plot, streams } from "./streams.js";

/**
 * One rank's pass as rows, one per bucket, all times in seconds since backward began.
 * `from`: when backward turned to the bucket's gradients; `computed`: when it had the last one;
 * `exposed`: for how long it then waited.
 */
export function passOf(timeline, rank) {
  const { ready, launched, done, end } = timeline.ranks[rank];
  const computed = Math.max(...ready);
  const rows = timeline.buckets.map((bucket, i) => ({
    ...bucket,
    from: Math.max(0, ...ready.filter((other) => other < ready[i])),
    ready: ready[i],
    launched: launched[i],
    done: done[i],
  }));
  return { rows, computed, end, exposed: end - computed };
}

/**
 * The same pass if each bucket were sent after backward, when the one before it is done. An
 * all-reduce takes as long as it had the link: from its launch, or the end of the one before it.
 */
export function withoutOverlap(pass) {
  let free = 0;
  let sent = pass.computed;
  const rows = pass.rows.map((row) => {
    const busy = Math.max(0, row.done - Math.max(row.launched, free));
    free = Math.max(free, row.done);
    const launched = sent;
    sent += busy;
    return { ...row, launched, done: sent };
  });
  const end = sent + (pass.end - free);
  return { rows, computed: pass.computed, end, exposed: end - pass.computed };
}

// A long name breaks behind a dot.
const breakable = (name) => name.split(/(?<=\.)/).flatMap((part, i) => (i ? [html("wbr"), part] : [part]));

function recordedPass(timeline, widget) {
  let rank = 0;
  let after = false;
  let selected = 0;

  const legend = html("p", { class: "legend" },
    ...[["segment", "computes"], ["ready", "ready"], ["bar", "on its way"], ["waiting", "backward waits"]]
      .map(([name, text]) => html("span", {}, html("i", { class: name }), text)));
  const chart = html("div", { class: "lanes" });
  const summary = html("p", { class: "summary", role: "status" });
  const details = html("div", { class: "readout" });

  const computing = html("div", { class: "track" });
  const waiting = html("div", { class: "waiting" });
  const axis = html("div", { class: "track axis" });
  const tracks = timeline.buckets.map((_, i) => {
    const wait = html("span", { class: "wait" });
    const bar = html("span", { class: "bar" });
    const ready = html("span", { class: "ready" });
    const row = html("button", {
      type: "button", class: "lane",
      click: () => select(i), focus: () => select(i), pointerenter: () => select(i),
      keydown: (event) => {
        const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        tracks[(i + step + tracks.length) % tracks.length].row.focus();
      },
    }, html("span", { class: "name" }, html("span", {}, "bucket "), String(i)),
      html("span", { class: "track" }, ready, wait, bar));
    const segment = html("span", { class: "segment", pointerenter: () => select(i) });
    computing.append(segment);
    return { row, wait, bar, ready, segment };
  });
  chart.append(
    html("div", { class: "lane head" }, html("span", { class: "name" }, "backward"), computing),
    ...tracks.map(({ row }) => row),
    html("div", { class: "lane foot", "aria-hidden": "true" }, html("span", { class: "name" }, "ms"), axis),
    html("div", { class: "lane over", "aria-hidden": "true" }, html("span", { class: "name" }),
      html("div", { class: "track" }, waiting)),
  );

  const place = (element, from, till, scale) => {
    element.style.left = `${(100 * from) / scale}%`;
    element.style.width = `${(100 * Math.max(0, till - from)) / scale}%`;
  };

  function select(i) {
    selected = i;
    const pass = passOf(timeline, rank);
    const row = (after ? withoutOverlap(pass) : pass).rows[i];
    tracks.forEach((track, other) => {
      track.row.setAttribute("aria-pressed", String(other === i));
      track.segment.classList.toggle("chosen", other === i);
    });
    const names = row.parameters;
    details.replaceChildren(
      html("p", { class: "readout-title" }, `Bucket ${i}: ${plural(names.length, "parameter")}, ${binaryBytes(row.bytes)}`),
      html("dl", {},
        ...[
          ["last gradient ready", row.ready, null],
          ["sent", row.launched, row.launched - row.ready > 5e-5 ? `${seconds(row.launched - row.ready)} after it was ready` : "at once"],
          ["averaged", row.done, `${seconds(row.done - row.launched)} on its way`],
        ].map(([what, when, note]) => html("div", {}, html("dt", {}, what), html("dd", {}, seconds(when)), note && html("dd", { class: "note" }, note)))),
      html("p", { class: "names" }, ...names.slice(0, 8).flatMap((name) => [html("code", {}, breakable(name)), " "]),
        names.length > 8 && `and ${names.length - 8} more`),
    );
  }

  function draw() {
    const recorded = passOf(timeline, rank);
    const apart = withoutOverlap(recorded);
    const pass = after ? apart : recorded;
    const scale = Math.max(recorded.end, apart.end);
    widget.style.setProperty("--rank", colourOf(rank));
    pass.rows.forEach((row, i) => {
      const { row: lane, wait, bar, ready, segment } = tracks[i];
      place(segment, row.from, row.ready, scale);
      place(wait, row.ready, row.launched, scale);
      place(bar, row.launched, row.done, scale);
      place(ready, row.ready, row.ready, scale);
      lane.setAttribute("aria-label",
        `bucket ${i}, ${binaryBytes(row.bytes)}: ready after ${seconds(row.ready)}, ` +
        `sent after ${seconds(row.launched)}, averaged after ${seconds(row.done)}`);
    });
    place(waiting, pass.computed, pass.end, scale);
    const step = tick(1000 * scale, 6);
    axis.replaceChildren(...Array.from({ length: Math.floor((1000 * scale) / step + 1e-9) + 1 }, (_, i) =>
      html("span", { style: { left: `${(100 * i * step) / (1000 * scale)}%` } }, String(Number((i * step).toPrecision(6))))));
    summary.replaceChildren(
      "Backward computes for ", html("strong", {}, seconds(pass.computed)), ", then waits for ",
      html("strong", {}, seconds(pass.exposed)), ". ",
      after
        ? `This is computed: each all-reduce takes as long as it did in the recording, where backward waited for ${seconds(recorded.exposed)}.`
        : `${percent(Math.max(0, 1 - recorded.exposed / apart.exposed))} of the communication is hidden.`);
    select(selected);
  }

  const controls = html("div", { class: "controls" },
    timeline.ranks.length > 1 && choice("Rank", new Map(timeline.ranks.map((_, i) => [i, String(i)])), rank, (value) => {
      rank = value;
      draw();
    }),
    choice("A bucket is sent", new Map([[false, "when it is full"], [true, "after backward"]]), after, (value) => {
      after = value;
      draw();
    }));
  draw();
  return [controls, chart, legend, summary, details];
}

// The tuner -----------------------------------------------------------------------------------

const MODEL = "360m";
const DEFAULT_CAP = 25;
export const CAPS = [0.25, 0.5, 1, 2, 4, 8, 16, DEFAULT_CAP, 50, 100, 200, 400, 800, 1600]; // MiB

/** Seconds of an all-reduce: by the table `inputs.measured`, or alpha + bytes / bandwidth. */
export function linkOf({ measured, alpha, bandwidth }) {
  if (!measured) return (bytes) => alpha + bytes / bandwidth;
  const points = ALL_REDUCE[measured].points.map(([bytes, microseconds]) => [bytes, microseconds * 1e-6]);
  return (bytes) => measuredSeconds(points, bytes);
}

/** A step with buckets of `cap` MiB. As in torch, the default alone has a first bucket of 1 MiB. */
export function tuned(inputs, cap) {
  const layers = llamaLayers(MODEL, inputs.backward / 2, inputs.backward);
  const plan = buckets(layers, cap * MIB, cap === DEFAULT_CAP ? MIB : cap * MIB);
  return { ...simulate(layers, linkOf(inputs), plan), buckets: plan.length };
}

function tuner() {
  const inputs = { measured: "allreduce_h100_8gpu", alpha: 30e-6, bandwidth: 250e9, backward: 0.03 };
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
  const links = new Map([...Object.entries(ALL_REDUCE).map(([table, { name }]) => [table, name]), ["", "α and bandwidth"]]);
  const controls = html("div", { class: "controls" },
    slider("Cap of a bucket", { min: 0, max: CAPS.length - 1, value: position, show: (i) => nameOf(CAPS[i]) }, (value) => {
      position = value;
      draw();
    }),
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
      `${plural(now.buckets, "bucket")} ${now.buckets === 1 ? "needs" : "need"} the link for ${seconds(now.communication)}. After backward the ranks wait for `,
      html("strong", {}, seconds(now.exposed)),
      best === position ? ": no other cap here leaves less." : `; ${seconds(steps[best].exposed)} with ${nameOf(CAPS[best])}.`);
    const table = ALL_REDUCE[inputs.measured];
    const total = gradientBytes(llamaLayers(MODEL, 0, 0));
    source.replaceChildren(
      `Computed for SmolLM2-360M: gradients of ${binaryBytes(total.reduce((sum, size) => sum + size))}, of which the embedding’s ${binaryBytes(total[0])} are ready last. `,
      ...(table ? ["All-reduces as ", html("a", { href: table.source[1] }, `measured by ${table.source[0]}`), ` on ${table.name}.`] : ["The link is your own."]));
  }

  function drawCurves(cap, steps, now) {
    const width = Math.max(240, inner(curves) || 700);
    const link = linkOf(inputs);
    const table = ALL_REDUCE[inputs.measured];
    const part = volume("ring", table?.ranks ?? 2);
    const rate = (bytes) => (1e-9 * bytes * part) / link(bytes);
    const dots = (table?.points ?? []).map(([bytes]) => [bytes / MIB, rate(bytes)])
      .filter(([size]) => size >= CAPS[0] && size <= CAPS.at(-1));
    const line = [...CAPS.map((each) => [each, rate(each * MIB)]), ...dots].sort(([a], [b]) => a - b);
    const waits = steps.map((step, i) => [CAPS[i], 1000 * step.exposed]);
    const common = { width, xs: CAPS, marks: [[DEFAULT_CAP, "25 MiB"]] };
    curves.replaceChildren(
      plot({
        ...common, height: 132, label: `${table ? "bus bandwidth of an all-reduce" : "bandwidth"}, GB/s`,
        top: 1.08 * Math.max(...line.map(([, value]) => value)), lines: { reached: line }, dots: { published: dots }, chosen: [cap, rate(cap * MIB)],
        alt: `Bandwidth against the size of a bucket: ${rate(DEFAULT_CAP * MIB).toPrecision(3)} GB/s at 25 MiB, ` +
          `${rate(CAPS.at(-1) * MIB).toPrecision(3)} at ${CAPS.at(-1)} MiB.`,
      }),
      plot({
        ...common, height: 156, label: "waits after backward, ms", below: "cap in MiB",
        top: 1.08 * Math.max(...waits.map(([, value]) => value)), lines: { reached: waits }, chosen: [cap, 1000 * now.exposed],
        alt: `Waiting after backward against the cap: ${seconds(steps[0].exposed)} at ${CAPS[0]} MiB, ` +
          `${seconds(steps[CAPS.indexOf(DEFAULT_CAP)].exposed)} at 25 MiB, ${seconds(steps.at(-1).exposed)} at ${CAPS.at(-1)} MiB.`,
      }));
  }

  new ResizeObserver(() => draw()).observe(curves);
  draw();
  return [controls, picture.element, curves, summary, source];
}

function build(timeline) {
  const widget = html("div", { class: "widget bucket-timeline" });
  const views = { recorded: recordedPass(timeline, widget), tuner: tuner() };
  const show = html("div", { class: "controls" },
    choice("Show", new Map([["recorded", "the recording"], ["tuner", "a tuner, computed"]]), "recorded", (name) => {
      for (const element of Object.values(views).flat()) element.remove();
      widget.append(...views[name]);
    }));
  widget.append(show, ...views.recorded);
  return widget;
}

mount("bucket-timeline", build);
