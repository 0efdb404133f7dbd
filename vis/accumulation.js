// Gradient accumulation: which backward passes send, and what each rank's .grad holds.

import { badge, button, choice, colourOf, html, mayMove, mount, slider } from "./interactive.js";

/** Micro-batches of a step; the optimizer's steps shown; the messages of one synchronisation. */
export const [MICRO_BATCHES, STEPS, BUCKETS] = [4, 2, 2];

const WAYS = new Map([
  ["every", "nothing"], ["backward", "backward of 0 to 2"], ["both", "forward and backward of 0 to 2"],
  ["first", "all of 1 to 3"], ["counter", "nothing: my hook counts to 4"],
]);

/** Whether [forward, backward] of micro-batch i run inside no_sync. */
export function inside(way, i) {
  const place = i % MICRO_BATCHES;
  const last = place === MICRO_BATCHES - 1;
  return { backward: [false, !last], both: [!last, !last], first: [place > 0, place > 0] }[way] ?? [false, false];
}

/** Whether backward of micro-batch i sends: DDP's forward decides; the hook that counts never starts again. */
export const sends = (way, i) => (way === "counter" ? i === MICRO_BATCHES - 1 : !inside(way, i)[0]);

/**
 * Every moment of two steps: forward and backward of each micro-batch, the optimizer's steps.
 * `grads[rank]` holds what each micro-batch of the step has added: 1 on rank 0 and 3 on rank 1,
 * 2 where it has been averaged. `messages` are those of the step so far.
 */
export function moments(way) {
  const found = [{ phase: "start", i: -1, messages: 0, grads: [[], []] }];
  let [grads, messages] = [[[], []], 0];
  for (let i = 0; i < STEPS * MICRO_BATCHES; i += 1) {
    found.push({ phase: "forward", i, messages, grads });
    grads = grads.map((slots, rank) => [...slots, 1 + 2 * rank]);
    if (sends(way, i)) {
      const mean = grads[0].map((own, slot) => (own + grads[1][slot]) / 2);
      [grads, messages] = [[mean, mean], messages + BUCKETS];
    }
    found.push({ phase: "backward", i, messages, grads });
    if ((i + 1) % MICRO_BATCHES === 0) {
      found.push({ phase: "step", i, messages, grads });
      [grads, messages] = [[[], []], 0];
    }
  }
  return found;
}

/** Whether both ranks hold the same. */
export const agree = ({ grads: [ours, theirs] }) => ours.every((value, slot) => value === theirs[slot]);

/** A moment in words. */
export function words(way, moment) {
  const { phase, i, messages } = moment;
  const [before, during] = inside(way, Math.max(i, 0));
  const name = `Micro-batch ${i % MICRO_BATCHES}, ${phase}`;
  if (phase === "start") return "Two ranks, four micro-batches for each step of the optimizer. Go forward, and predict what leaves.";
  if (phase === "step") {
    const verdict = agree(moment) ? "Both ranks take the same step" : "The ranks take different steps, and drift apart without an error";
    return `The optimizer. ${verdict}, after ${messages} messages.`;
  }
  if (phase === "forward") {
    if (way === "counter") return `${name}. The hook of one's own knows nothing of it.`;
    return `${name}, ${before ? "inside" : "outside"} no_sync: it tells the hooks to ${before ? "keep the gradients" : "send"}.`;
  }
  if (!sends(way, i)) return `${name}: the hooks are silent. Each rank adds to its own .grad.`;
  const late = during ? " Inside no_sync, but too late: forward has decided." : "";
  return `${name}: both buckets leave, 2 messages. All that is in .grad becomes the mean of the ranks.${late}`;
}

// The page ------------------------------------------------------------------------------------

function build() {
  let [way, now] = ["both", 0];
  let all = moments(way);
  const body = html("tbody", {});
  const says = html("p", { class: "says", role: "status" });

  const cell = (done, covered, text) =>
    html("td", {}, html("span", { class: `pass${covered ? " covered" : ""}${done ? " done" : ""}` }, done ? text : "\u00a0"));

  const slots = (moment, rank) => html("td", { class: "grad", style: { "--rank": colourOf(rank) } },
    [...Array(MICRO_BATCHES).keys()].map((slot) => {
      const value = moment ? moment.grads[rank][slot] : undefined;
      return html("i", { class: value === undefined ? "" : value === 2 ? "mean" : "own" }, value ?? "\u00a0");
    }));

  function line(i) {
    const ran = (phase) => all.findIndex((moment) => moment.phase === phase && moment.i === i) <= now;
    const after = ran("backward") && all.find((moment) => moment.phase === "backward" && moment.i === i);
    const [before, during] = inside(way, i);
    const told = way === "counter" ? "ran" : before ? "keep" : "send";
    const row = html("tr", { "data-micro-batch": i, class: all[now].i === i && all[now].phase !== "step" ? "now" : "" },
      html("th", { scope: "row" }, String(i % MICRO_BATCHES)),
      cell(ran("forward"), before, told),
      cell(after, during, sends(way, i) ? "⇄ 2" : "silent"), slots(after, 0), slots(after, 1));
    if ((i + 1) % MICRO_BATCHES) return row;
    const step = ran("step") && all.find((moment) => moment.phase === "step" && moment.i === i);
    const same = step && agree(step);
    return [row, html("tr", { class: "optimizer" }, html("th", { scope: "row", colspan: 3 }, "optimizer",
      step && html("span", {}, `: ${step.messages} messages`)),
      html("td", { colspan: 2, class: same ? "same" : "apart" }, step ? (same ? "= the same" : "≠ different") : "\u00a0"))];
  }

  const place = slider("Moment:", { min: 0, max: all.length - 1, value: 0, show: (value) => `${value} of ${all.length - 1}` }, go);
  const back = button("One moment back", "◀", () => go(now - 1));
  const forward = button("One moment forward", "▶", () => go(now + 1));
  forward.classList.add("main");

  function go(moment) {
    if (moment < 0 || moment >= all.length) return;
    const advanced = moment === now + 1;
    now = moment;
    place.set(now);
    [back.disabled, forward.disabled] = [now === 0, now === all.length - 1];
    body.replaceChildren(...[...Array(STEPS * MICRO_BATCHES).keys()].flatMap(line));
    says.textContent = words(way, all[now]);
    if (!advanced || !mayMove() || all[now].phase !== "backward" || !sends(way, all[now].i)) return;
    for (const [rank, grad] of body.querySelectorAll(".now .grad").entries()) { // the two means meet
      const frames = [{ transform: `translateX(${rank ? -60 : 60}%)`, opacity: 0.3 }, { transform: "none", opacity: 1 }];
      for (const slot of grad.querySelectorAll(".mean")) slot.animate(frames, { duration: 450, easing: "ease-out" });
    }
  }

  const column = (...name) => html("th", { scope: "col" }, ...name);
  const widget = html("div", { class: "widget accumulation", keydown: (event) => {
    if (event.target.matches("input")) return;
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    go(to);
  } },
    html("div", { class: "controls" }, choice("Inside no_sync", WAYS, way, (chosen) => {
      way = chosen;
      all = moments(way);
      go(now);
    })),
    html("div", { class: "picture" },
      html("table", {}, html("caption", { class: "visually-hidden" }, "Two steps of the optimizer, micro-batch by micro-batch"),
        html("thead", {}, html("tr", {}, column("#"), column("forward"), column("backward"),
          column(badge(0), " .grad"), column(badge(1), " .grad"))), body),
      html("p", { class: "note" }, html("span", { class: "pass covered" }, "inside no_sync"),
        " keep, send: what forward tells the hooks · ⇄ messages leave · ", html("i", { class: "own" }, "1"), " one rank's own · ", html("i", { class: "mean" }, "2"), " mean of both")),
    says, html("div", { class: "controls" }, html("div", { class: "buttons" }, back, forward), place));
  go(2 * MICRO_BATCHES + 1); // the first step is done
  return widget;
}

mount("accumulation", build);
