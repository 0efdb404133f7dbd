// The ring stepper: a ring all-reduce on 2 to 8 ranks, step by step.

import { badge, button, choice, colourOf, html, mayMove, mount, slider, svg } from "./interactive.js";

const TRAVEL = 650; // milliseconds
const REST = 950;
const LETTERS = "abcdefgh";

/** The remainder of a division as Python has it, never negative. */
export const mod = (value, n) => ((value % n) + n) % n;

/** The chunk that a rank sends in a step of either phase (miniddp.ring). */
export const reduceScatterSends = (rank, step, n) => mod(rank - step - 1, n);
export const allGatherSends = (rank, step, n) => mod(rank - step, n);

/**
 * Every moment of an all-reduce on `n` ranks: the start, then one after each of 2 (n - 1) steps.
 * `held[rank][chunk]` lists the ranks whose numbers are in that sum, `stale[rank][chunk]` says that
 * the sum has gone on, `transfers` are the moves that led here: { from, to, chunk }.
 */
export function states(n) {
  const ranks = [...Array(n).keys()];
  const held = ranks.map((rank) => ranks.map(() => [rank]));
  const stale = ranks.map(() => ranks.map(() => false));
  const moments = [{ phase: "start", transfers: [], held: copy(held), stale: copy(stale) }];
  for (let step = 0; step < 2 * (n - 1); step += 1) {
    const adding = step < n - 1;
    const phase = adding ? "reduce-scatter" : "all-gather";
    const transfers = ranks.map((from) => ({
      from,
      to: mod(from + 1, n),
      chunk: adding ? reduceScatterSends(from, step, n) : allGatherSends(from, step - (n - 1), n),
    }));
    const travelling = transfers.map(({ from, chunk }) => held[from][chunk]);
    transfers.forEach(({ from, to, chunk }, i) => {
      const own = adding ? held[to][chunk] : [];
      held[to][chunk] = [...own, ...travelling[i]].sort((a, b) => a - b);
      stale[to][chunk] = false;
      if (adding) stale[from][chunk] = true;
    });
    moments.push({ phase, transfers, held: copy(held), stale: copy(stale) });
  }
  return moments;
}

const copy = (table) => table.map((row) => [...row]);

/** The number that a rank brings for a chunk: small, and different enough to follow. */
export const numberOf = (rank, chunk) => 1 + mod(5 * rank + 3 * chunk + rank * chunk, 9);

/** The sum of the numbers of some ranks for a chunk. */
export const sumOf = (ranks, chunk) => ranks.reduce((sum, rank) => sum + numberOf(rank, chunk), 0);

/** What each rank has sent after a number of steps, in units of the tensor. */
export const sentAfter = (steps, n) => steps / n;

// The page ------------------------------------------------------------------------------------

const ICONS = {
  start: "M2 2h2.2v12H2Zm12 0v12L5 8Z",
  back: "M12 2v12L3 8Z",
  play: "M3 1.5v13L14 8Z",
  pause: "M3 2h3.6v12H3Zm6.4 0H13v12H9.4Z",
  forward: "M4 2v12l9-6Z",
};
const icon = (name) => svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));

const times = (value) => `${Number(value.toFixed(2))}`;

function build() {
  let n = 4;
  let moments = states(n);
  let now = 0;
  let numbers = false;
  let timer = null;
  let flights = [];

  // The table -----------------------------------------------------------------------------------

  const board = html("div", { class: "board" });
  let cells;

  function layOut() {
    const ranks = [...Array(n).keys()];
    cells = ranks.map((rank) => ranks.map(() => html("td", { style: { "--rank": colourOf(rank) } })));
    board.replaceChildren(
      html("div", { class: "way-back", "aria-hidden": "true" }),
      html("table", {},
        html("caption", { class: "visually-hidden" }, "What each rank holds of each chunk"),
        html("thead", {}, html("tr", {}, html("td", {}),
          ranks.map((rank) => html("th", { scope: "col", "aria-label": `rank ${rank}` }, badge(rank))))),
        html("tbody", {}, ranks.map((chunk) => html("tr", {},
          html("th", { scope: "row" }, html("span", {}, "chunk "), String(chunk)),
          ranks.map((rank) => cells[rank][chunk]))))),
      html("div", { class: "air", "aria-hidden": "true" }));
    board.style.setProperty("--n", n);
    widget.dataset.ranks = n;
  }

  const slots = (held) => html("span", { class: "slots", "aria-hidden": "true" },
    [...Array(n).keys()].map((rank) => html("i", {
      class: held.includes(rank) ? "in" : "out", style: { "--rank": colourOf(rank) },
    }, held.includes(rank) ? LETTERS[rank] : "")));

  function content(moment, rank, chunk) {
    const held = moment.held[rank][chunk];
    const arrived = moment.transfers.some(({ to, chunk: moved }) => to === rank && moved === chunk);
    const words = held.length === n ? "sum of all ranks" : `${held.length > 1 ? "sum of ranks" : "rank"} ${held.join(", ")}`;
    const worked = arrived && moment.phase === "reduce-scatter";
    return [
      slots(held),
      numbers && html("span", { class: "sum" }, String(sumOf(held, chunk))),
      numbers && html("small", { "aria-hidden": "true" },
        worked ? `${sumOf([rank], chunk)}+${sumOf(held.filter((other) => other !== rank), chunk)}` : "\u00a0"),
      html("span", { class: "visually-hidden" }, numbers ? ` (${words})` : words),
    ];
  }

  function fillCells() {
    const moment = moments[now];
    const next = moments[now + 1]?.transfers ?? [];
    for (let rank = 0; rank < n; rank += 1) {
      for (let chunk = 0; chunk < n; chunk += 1) {
        const cell = cells[rank][chunk];
        const is = (name, on) => cell.classList.toggle(name, on);
        is("whole", moment.held[rank][chunk].length === n);
        is("stale", moment.stale[rank][chunk]);
        is("fresh", moment.transfers.some((move) => move.to === rank && move.chunk === chunk));
        is("leaving", next.some((move) => move.from === rank && move.chunk === chunk));
        cell.replaceChildren(html("div", { class: "cell" }, ...content(moment, rank, chunk).filter(Boolean)));
      }
    }
  }

  // Every chunk that is sent flies to the right; the last rank's leaves on one side and comes in
  // on the other.
  function fly(from, moves) {
    const air = board.querySelector(".air");
    const frame = air.getBoundingClientRect();
    const flight = (rank, chunk, dx, at) => {
      const box = cells[rank][chunk].firstChild.getBoundingClientRect();
      const ghost = html("div", { class: "cell ghost", style: {
        "--rank": colourOf(rank), left: `${at - frame.left}px`, top: `${box.top - frame.top}px`,
        width: `${box.width}px`, height: `${box.height}px`,
      } }, ...content(from, rank, chunk).filter(Boolean));
      air.append(ghost);
      return ghost.animate([{ transform: "none" }, { transform: `translateX(${dx}px)` }],
        { duration: TRAVEL, easing: "cubic-bezier(.45,.05,.3,1)", fill: "forwards" });
    };
    const left = (rank) => cells[rank][0].firstChild.getBoundingClientRect().left;
    const stride = left(1) - left(0);
    for (const { from: rank, chunk } of moves) {
      flights.push(flight(rank, chunk, stride, left(rank)));
      if (rank === n - 1) flights.push(flight(rank, chunk, stride, left(0) - stride));
      cells[rank][chunk].classList.add("sending");
    }
    return Promise.all(flights.map((each) => each.finished));
  }

  function land() {
    for (const each of flights) each.cancel();
    flights = [];
    board.querySelector(".air").replaceChildren();
    for (const cell of cells.flat()) cell.classList.remove("sending");
  }

  // What it says --------------------------------------------------------------------------------

  const title = html("p", { class: "phase" });
  const words = html("p", { class: "words", role: "status" });
  const meter = html("div", { class: "meter", "aria-hidden": "true" });
  const sent = html("p", { class: "sent" });

  function explain() {
    const { phase } = moments[now];
    const last = moments.length - 1;
    const adding = phase === "reduce-scatter";
    const step = adding ? now - 1 : now - n;
    title.replaceChildren(
      html("strong", {}, phase === "start" ? "Start" : adding ? "Reduce-scatter" : "All-gather"),
      phase === "start" ? "" : `, step s = ${step}`);
    const chunk = adding ? reduceScatterSends(0, step, n) : allGatherSends(0, step, n);
    const formula = `(0\u00a0−\u00a0${step}${adding ? "\u00a0−\u00a01" : ""})\u00a0mod\u00a0${n}\u00a0=\u00a0${chunk}`;
    words.replaceChildren(...{
      start: [`Each rank has its own numbers, cut into ${n} chunks. A slot for each rank: filled where its numbers are in.`],
      "reduce-scatter": [`Each rank has sent one chunk to its right, and added the one from its left. Rank 0 sent chunk ${formula}.`,
        now === n - 1 ? " Now chunk r is complete on rank r." : ""],
      "all-gather": [`Each rank has sent a complete chunk to its right, where it replaced what was there. Rank 0 sent chunk ${formula}.`,
        now === last ? " Every rank holds every sum." : ""],
    }[phase]);
    meter.replaceChildren(...["reduce-scatter", "all-gather"].map((name, half) =>
      html("div", {}, html("span", {}, name), html("div", {},
        [...Array(n - 1).keys()].map((i) => html("i", { class: half * (n - 1) + i < now ? "done" : "" }))))));
    sent.replaceChildren("Sent by each rank so far: ",
      html("strong", {}, `${now}\u00a0×\u00a0S/${n} = ${times(sentAfter(now, n))}\u00a0S`),
      now === last
        ? `, the whole of 2\u00a0(N\u00a0−\u00a01)/N\u00a0·\u00a0S.`
        : ` of 2\u00a0(N\u00a0−\u00a01)/N\u00a0·\u00a0S = ${times(sentAfter(last, n))}\u00a0S.`);
  }

  // Moving through it ---------------------------------------------------------------------------

  const place = slider("Sends done:", { min: 0, max: moments.length - 1, value: 0, show: (step) => `${step} of ${moments.length - 1}` },
    (step) => {
      stop();
      go(step);
    });
  const buttons = {
    start: button("To the start", icon("start"), () => stop() || go(0)),
    back: button("One step back", icon("back"), () => stop() || go(now - 1)),
    play: button("Play", icon("play"), () => (timer ? stop() : play())),
    forward: button("One step forward", icon("forward"), () => stop() || go(now + 1, true)),
  };
  buttons.play.classList.add("main");

  async function go(step, moving = false) {
    if (step < 0 || step >= moments.length || step === now) return;
    land();
    const before = moments[now];
    now = step;
    place.set(now);
    buttons.start.disabled = buttons.back.disabled = now === 0;
    buttons.forward.disabled = now === moments.length - 1;
    explain();
    if (moving && mayMove()) {
      try {
        await fly(before, moments[now].transfers);
      } catch {
        return; // another step came first
      }
      land();
    }
    fillCells();
  }

  function play() {
    const next = () => {
      go(now + 1, true);
      if (now === moments.length - 1) stop();
      else timer = setTimeout(next, TRAVEL + REST);
    };
    if (now === moments.length - 1) go(0);
    words.setAttribute("aria-live", "off"); // too fast to be read aloud
    show("pause", "Pause");
    timer = setTimeout(next, 0);
  }

  function stop() {
    clearTimeout(timer);
    timer = null;
    words.removeAttribute("aria-live");
    show("play", "Play");
  }

  function show(name, label) {
    buttons.play.replaceChildren(icon(name));
    buttons.play.setAttribute("aria-label", label);
    buttons.play.title = label;
  }

  function restart(ranks) {
    stop();
    land();
    n = ranks;
    moments = states(n);
    now = 0;
    place.range.max = moments.length - 1;
    place.set(0);
    buttons.start.disabled = buttons.back.disabled = true;
    buttons.forward.disabled = false;
    layOut();
    fillCells();
    explain();
  }

  const widget = html("div", { class: "widget ring-stepper", keydown: (event) => {
    if (event.target.matches("input")) return;
    const step = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: moments.length - 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    stop();
    go(step, event.key === "ArrowRight");
  } },
    html("div", { class: "controls" },
      choice("Ranks", new Map([2, 3, 4, 5, 6, 7, 8].map((ranks) => [ranks, String(ranks)])), n, restart),
      choice("Show", new Map([[false, "who is in it"], [true, "numbers"]]), numbers, (value) => {
        numbers = value;
        land();
        fillCells();
      })),
    html("div", { class: "picture" }, title, board),
    html("div", { class: "said" }, words, meter, sent),
    html("div", { class: "controls" }, html("div", { class: "buttons" }, Object.values(buttons)), place));
  board.append(html("div", { class: "air" }));
  cells = [[]];
  restart(n);
  return widget;
}

mount("ring-stepper", build);
