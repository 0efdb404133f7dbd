// The shard explorer: which rank reads which sample, for any length, order and number of ranks.

import { badge, button, choice, colourOf, html, mayMove, mount, number, plural, slider } from "./interactive.js";

// The order of an epoch -----------------------------------------------------------------------

/** MT19937 (Matsumoto and Nishimura, 1998), seeded as torch.Generator does: 32 random bits per call. */
export function mersenneTwister(seed) {
  const state = new Uint32Array(624);
  state[0] = seed >>> 0;
  for (let i = 1; i < 624; i += 1) {
    const last = state[i - 1] ^ (state[i - 1] >>> 30);
    state[i] = Math.imul(1812433253, last) + i;
  }
  let next = 624;
  const renew = () => {
    for (let i = 0; i < 624; i += 1) {
      const mixed = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
      state[i] = state[(i + 397) % 624] ^ (mixed >>> 1) ^ (mixed & 1 ? 0x9908b0df : 0);
    }
    next = 0;
  };
  return () => {
    if (next === 624) renew();
    let bits = state[next];
    next += 1;
    bits ^= bits >>> 11;
    bits ^= (bits << 7) & 0x9d2c5680;
    bits ^= (bits << 15) & 0xefc60000;
    bits ^= bits >>> 18;
    return bits >>> 0;
  };
}

/** torch.randperm(length) on a CPU with a generator of that seed. */
export function randperm(length, seed) {
  const random = mersenneTwister(seed);
  const order = [...Array(length).keys()];
  for (let i = 0; i < length - 1; i += 1) {
    const other = i + (random() % (length - i));
    [order[i], order[other]] = [order[other], order[i]];
  }
  return order;
}

/** All samples in the order of one epoch (miniddp.sampler.epoch_order). */
export const epochOrder = (length, shuffle, seed, epoch) =>
  shuffle ? randperm(length, seed + epoch) : [...Array(length).keys()];

/** Make the length a multiple of the world size (miniddp.sampler.equalise). */
export function equalise(order, worldSize, dropLast) {
  if (dropLast) return order.slice(0, order.length - (order.length % worldSize));
  const total = Math.ceil(order.length / worldSize) * worldSize;
  return Array.from({ length: total }, (_, i) => order[i % order.length]);
}

/** The positions of a rank's shard (miniddp.sampler.shard). */
export function shard(length, worldSize, rank, contiguous) {
  if (!contiguous) {
    return Array.from({ length: Math.max(0, Math.ceil((length - rank) / worldSize)) }, (_, i) => rank + i * worldSize);
  }
  const [from, till] = [rank, rank + 1].map((each) => Math.floor((length * each) / worldSize));
  return Array.from({ length: till - from }, (_, i) => from + i);
}

/**
 * Which rank reads which sample. `rest` says what happens where the ranks do not divide the
 * length: "pad" repeats samples from the start, "drop" leaves the end out, "keep" leaves the
 * shards uneven. `ranks[r]` lists { sample, position, again } in the order of reading.
 */
export function shards({ length, worldSize, shuffle, seed, epoch, rest, contiguous }) {
  const all = epochOrder(length, shuffle, seed, epoch);
  const order = rest === "keep" ? all : equalise(all, worldSize, rest === "drop");
  const ranks = [...Array(worldSize).keys()].map((rank) =>
    shard(order.length, worldSize, rank, contiguous).map((position) => ({
      sample: order[position], position, again: position >= length,
    })));
  return { order, ranks, dropped: all.slice(order.length) };
}

// The page ------------------------------------------------------------------------------------

const LONGEST = 40;

function build() {
  const chosen = { length: 10, worldSize: 4, shuffle: true, seed: 0, epoch: 0, rest: "pad", contiguous: false };
  let tiles = new Map(); // by sample and whether it is read again

  const strip = html("ol", { class: "order", "aria-label": "The order of the epoch" });
  const rows = html("div", { class: "readers" });
  const says = html("p", { class: "says", role: "status" });
  const code = html("code");

  const tile = ({ sample, again }, rank) => html("li", {
    class: again ? "tile again" : "tile", "data-sample": sample, style: { "--rank": colourOf(rank) },
    pointerenter: () => mark(sample), pointerleave: () => mark(null),
  }, String(sample), again && html("span", { class: "visually-hidden" }, " (again)"));

  function mark(sample) {
    for (const each of widget.querySelectorAll("[data-sample]")) {
      each.classList.toggle("marked", sample !== null && Number(each.dataset.sample) === sample);
    }
  }

  function draw() {
    const before = new Map([...tiles].map(([key, element]) => [key, element.getBoundingClientRect()]));
    const { order, ranks, dropped } = shards(chosen);
    const owner = new Map(ranks.flatMap((mine, rank) => mine.map(({ position }) => [position, rank])));
    strip.replaceChildren(
      ...order.map((sample, position) => tile({ sample, again: position >= chosen.length }, owner.get(position))),
      ...dropped.map((sample) => html("li", { class: "tile dropped", "data-sample": sample },
        String(sample), html("span", { class: "visually-hidden" }, " (left out)"))));
    tiles = new Map();
    rows.replaceChildren(...ranks.map((mine, rank) => html("div", { class: "reader", style: { "--rank": colourOf(rank) } },
      html("span", { class: "who" }, html("span", { class: "visually-hidden" }, "rank "), badge(rank)),
      html("ol", { "aria-label": `rank ${rank} reads` }, mine.map((entry) => {
        const made = tile(entry, rank);
        tiles.set(`${entry.sample}${entry.again ? `+${entry.position}` : ""}`, made);
        return made;
      })),
      html("small", {}, mine.length ? String(mine.length) : "nothing"))));
    explain(ranks, dropped);
    if (mayMove()) {
      for (const [key, element] of tiles) {
        const from = before.get(key);
        const to = element.getBoundingClientRect();
        if (from && (from.left !== to.left || from.top !== to.top)) {
          element.animate([{ transform: `translate(${from.left - to.left}px, ${from.top - to.top}px)` }, { transform: "none" }],
            { duration: 450, easing: "ease-out" });
        }
      }
    }
  }

  function explain(ranks, dropped) {
    const counts = ranks.map((mine) => mine.length);
    const [least, most] = [Math.min(...counts), Math.max(...counts)];
    const again = ranks.flat().filter((entry) => entry.again).length;
    const reads = least === most ? `Each rank reads ${plural(most, "sample")}.`
      : `The ranks read ${least} or ${most} samples. That is right for evaluation; in training the ranks with one more would wait for ever.`;
    says.replaceChildren(reads,
      again ? ` ${plural(again, "read")} ${again === 1 ? "is a repetition" : "are repetitions"}, so that the shards are equal.` : "",
      dropped.length ? ` ${plural(dropped.length, "sample")} ${dropped.length === 1 ? "is" : "are"} left out in this epoch.` : "",
      least === 0 ? " A rank without samples: miniddp's sampler refuses that." : "");
    says.classList.toggle("warn", least !== most || least === 0);
    code.textContent = program(chosen);
  }

  const set = (name) => (value) => {
    chosen[name] = value;
    const still = !chosen.shuffle;
    for (const control of [seed.box, less, more]) control.disabled = still;
    less.disabled ||= chosen.epoch === 0;
    epochs.textContent = chosen.epoch;
    draw();
  };

  const seed = number("Seed", { min: 0, max: 99999, step: 1, value: chosen.seed }, set("seed"));
  const epochs = html("output", {}, "0");
  const less = button("Previous epoch", "−", () => set("epoch")(chosen.epoch - 1));
  const more = button("Next epoch", "+", () => set("epoch")(chosen.epoch + 1));
  less.disabled = true;
  const widget = html("div", { class: "widget shard-explorer" },
    html("div", { class: "controls" },
      slider("Samples", { min: 1, max: LONGEST, value: chosen.length }, set("length")),
      choice("Ranks", new Map([1, 2, 3, 4, 5, 6, 7, 8].map((ranks) => [ranks, String(ranks)])), chosen.worldSize, set("worldSize")),
      choice("Order", new Map([[true, "shuffled"], [false, "as stored"]]), chosen.shuffle, set("shuffle")),
      seed,
      html("div", { class: "epoch", role: "group", "aria-label": "Epoch" }, html("span", {}, "Epoch ", epochs), html("span", { class: "buttons" }, less, more)),
      choice("Shards", new Map([[false, "strided"], [true, "contiguous"]]), chosen.contiguous, set("contiguous")),
      choice("If it does not divide", new Map([["pad", "repeat"], ["drop", "drop"], ["keep", "keep uneven"]]), chosen.rest, set("rest"))),
    html("div", { class: "picture" },
      html("p", { class: "note" }, "The order of the epoch, each sample in the colour of the rank that reads it"), strip,
      html("p", { class: "note" }, "What each rank reads, from left to right"), rows),
    says,
    html("pre", { class: "program", tabindex: "0", "aria-label": "The same in Python" }, code));
  draw();
  return widget;
}

/** The same in Python, for the rank `rank`. */
export function program({ length, worldSize, shuffle, seed, epoch, rest, contiguous }) {
  const order = `order = epoch_order(${length}, shuffle=${shuffle ? "True" : "False"}, seed=${seed}, epoch=${epoch})`;
  const pick = `[order[i] for i in shard(len(order), ${worldSize}, rank${contiguous ? ", contiguous=True" : ""})]`;
  if (rest === "keep") return [order, pick].join("\n");
  const dropLast = rest === "drop" ? "True" : "False";
  if (contiguous) return [order, `order = equalise(order, ${worldSize}, drop_last=${dropLast})`, pick].join("\n");
  const options = [!shuffle && "shuffle=False", shuffle && seed > 0 && `seed=${seed}`, rest === "drop" && "drop_last=True"];
  const sampler = ["range(" + length + ")", worldSize, "rank", ...options.filter(Boolean)].join(", ");
  return [`sampler = DistributedSampler(${sampler})`, `sampler.set_epoch(${epoch})`, "list(sampler)"].join("\n");
}

mount("shard-explorer", build);
