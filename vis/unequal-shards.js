// Unequal shards: samples move between ranks; the mean of the ranks' means, plain and weighted.

import { badge, button, choice, colourOf, html, mayMove, mount, svg } from "./interactive.js";
import { shard } from "./shard-explorer.js";

/** The gradients of the chapter's six samples. */
export const GRADIENTS = [8, 2, 5, 5, 1, 3];

/** The rank of each sample if the ranks' shares are as equal as they can be. */
export function deal(worldSize) {
  const owner = [];
  for (let rank = 0; rank < worldSize; rank += 1) {
    for (const sample of shard(GRADIENTS.length, worldSize, rank, true)) owner[sample] = rank;
  }
  return owner;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => sum(values) / values.length;

/**
 * What the ranks compute if sample i belongs to rank `owner[i]`: the `counts` of samples, each
 * rank's `own` mean, its weight (miniddp.accumulation.mean_weights), the `plain` mean of the own
 * means, the `weighted` one, and that of `all` samples.
 */
export function means(owner, worldSize, gradients = GRADIENTS) {
  const shares = [...Array(worldSize).keys()].map((rank) => gradients.filter((_, i) => owner[i] === rank));
  const counts = shares.map((share) => share.length);
  const own = shares.map(mean);
  const weights = counts.map((count) => (count * worldSize) / gradients.length);
  const weighted = mean(own.map((value, rank) => weights[rank] * value));
  return { counts, own, weights, plain: mean(own), weighted, all: mean(gradients) };
}

const same = (a, b) => Math.abs(a - b) < 1e-9;
const short = (value) => String(Number(value.toFixed(2)));

/** What has come out, in words and with the numbers. */
export function verdict({ counts, own, weights, plain, weighted, all }) {
  const ranks = counts.length;
  const sums = `(${own.map(short).join(" + ")}) / ${ranks} = ${short(plain)}`;
  if (new Set(counts).size === 1) {
    return `Equal counts: the mean of the ranks' means is ${sums}, as that of all samples.`;
  }
  const terms = own.map((value, rank) => `${short(weights[rank])} · ${short(value)}`).join(" + ");
  const found = same(plain, all)
    ? `The plain mean is ${sums}. That is right by luck: the counts differ.`
    : `The plain mean is ${sums}, but that of all samples is ${short(all)}.`;
  return `${found} Weighted by the counts: (${terms}) / ${ranks} = ${short(weighted)}.`;
}

// The page ------------------------------------------------------------------------------------

const [LEFT, RIGHT, ROW, MOST] = [20, 425, 30, 9];
const at = (value) => LEFT + ((RIGHT - LEFT) * value) / MOST;

/** The means on a line of numbers: a row for each rank, then the plain and the weighted one. */
function line(found) {
  const { counts, own, plain, weighted, all } = found;
  const middle = (row) => 32 + ROW * row;
  const bottom = middle(own.length + 1) + 20;
  const result = (row, name, value) => {
    const right = same(value, all);
    const text = `${name}: ${short(value)} ${right ? "=" : "≠"} ${short(all)}`;
    const [side, anchor] = !right && value < all && at(value) > 170 ? [-12, "end"] : [12, "start"];
    return svg("g", { class: right ? "right" : "wrong" },
      svg("rect", { x: at(value) - 5, y: middle(row) - 5, width: 10, height: 10, transform: `rotate(45 ${at(value)} ${middle(row)})` }),
      svg("text", { x: at(value) + side, y: middle(row) + 5, "text-anchor": anchor }, text));
  };
  return svg("svg", { class: "plot", viewBox: `0 0 440 ${bottom + 20}`, role: "img", "aria-label":
    "The ranks' means on a line of numbers, and below them their plain and their weighted mean, beside the mean of all samples." },
    svg("text", { class: "marked", x: at(all), y: 12, "text-anchor": "middle" }, `all samples: ${short(all)}`),
    svg("line", { class: "mark", x1: at(all), x2: at(all), y1: 18, y2: bottom }),
    svg("line", { class: "gridline", x1: LEFT, x2: RIGHT, y1: bottom, y2: bottom }),
    [...Array(MOST + 1).keys()].map((value) => svg("text", { x: at(value), y: bottom + 16, "text-anchor": "middle" }, value)),
    own.map((value, rank) => svg("g", { style: { "--rank": colourOf(rank) } },
      svg("circle", { cx: at(value), cy: middle(rank), r: 8 + 1.5 * counts[rank] }),
      svg("text", { class: "on", x: at(value), y: middle(rank) + 5, "text-anchor": "middle" }, rank))),
    result(own.length, "plain", plain), result(own.length + 1, "weighted", weighted));
}

function build() {
  let [ranks, owner] = [2, deal(2)];
  const lanes = html("div", { class: "lanes" });
  const picture = html("div", {});
  const says = html("p", { class: "says", role: "status" });
  const tiles = GRADIENTS.map((gradient, sample) => html("button", {
    type: "button", class: "tile", click: () => move(sample, 1),
    keydown: (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      move(sample, step);
    },
  }, String(gradient)));

  function move(sample, step) {
    if (owner.filter((rank) => rank === owner[sample]).length === 1) {
      says.textContent = `Rank ${owner[sample]} keeps its last sample: of none there is no mean.`;
      return;
    }
    owner = owner.map((rank, i) => (i === sample ? (rank + step + ranks) % ranks : rank));
    draw();
    tiles[sample].focus();
  }

  function draw() {
    const before = tiles.map((tile) => tile.getBoundingClientRect());
    const found = means(owner, ranks);
    tiles.forEach((tile, sample) => tile.setAttribute("aria-label",
      `gradient ${GRADIENTS[sample]} on rank ${owner[sample]}: move to rank ${(owner[sample] + 1) % ranks}`));
    lanes.replaceChildren(...found.own.map((value, rank) => html("div", { class: "lane", style: { "--rank": colourOf(rank) } },
      badge(rank), html("span", { class: "samples" }, tiles.filter((_, sample) => owner[sample] === rank)),
      html("small", {}, `mean ${short(value)}, weight ${short(found.weights[rank])}`))));
    picture.replaceChildren(line(found));
    says.textContent = verdict(found);
    if (!mayMove()) return;
    tiles.forEach((tile, sample) => {
      const [from, to] = [before[sample], tile.getBoundingClientRect()];
      if (!from.width || (from.left === to.left && from.top === to.top)) return;
      tile.animate([{ transform: `translate(${from.left - to.left}px, ${from.top - to.top}px)` }, { transform: "none" }],
        { duration: 350, easing: "ease-out" });
    });
  }

  function again(count) {
    [ranks, owner] = [count, deal(count)];
    draw();
  }

  draw();
  return html("div", { class: "widget unequal-shards" },
    html("div", { class: "controls" },
      choice("Ranks", new Map([[2, "2"], [3, "3"], [4, "4"]]), ranks, again),
      html("span", { class: "buttons" }, button("Deal the samples out anew", "Deal anew", () => again(ranks)))),
    html("div", { class: "picture" },
      html("p", { class: "note" }, "Six samples with their gradients. Press one, and it moves to the next rank."), lanes, picture),
    says);
}

mount("unequal-shards", build);
