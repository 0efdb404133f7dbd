// The bucket timeline: one recorded backward pass, what was computed, what was sent meanwhile.

import { binaryBytes, choice, colourOf, html, mount, percent, plural, seconds, tick } from "./interactive.js";

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

function build(timeline) {
  const widget = html("div", { class: "widget bucket-timeline" });
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
  widget.append(controls, chart, legend, summary, details);
  return widget;
}

mount("bucket-timeline", build);
