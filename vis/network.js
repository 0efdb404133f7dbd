// How long an all-reduce takes: instruments.network, function by function. No page in here.

export const ALGORITHMS = ["ring", "tree", "switch"];
const LAUNCH = 7e-6;
const TREE = 0.92;
const FILL = 4;

/** Bytes that the busiest port sends, over the bytes of the tensor. */
export function volume(algorithm, worldSize) {
  if (worldSize === 1) return 0;
  if (algorithm === "ring") return (2 * (worldSize - 1)) / worldSize;
  if (algorithm === "tree") return worldSize === 2 ? 1 : 2;
  return (worldSize + 1) / worldSize;
}

/** Messages that wait for one another. */
export function steps(algorithm, worldSize) {
  if (worldSize === 1) return 0;
  return { ring: 2 * (worldSize - 1), tree: 2 * Math.ceil(Math.log2(worldSize)), switch: 2 }[algorithm];
}

/**
 * Seconds of an all-reduce by the fastest algorithm. A network has ranksPerNode, rails, and the
 * links { alpha, beta } inside, rail, switch (null where the switch cannot add).
 */
export function allReduceSeconds(network, bytes, worldSize) {
  if (worldSize === 1) return 0;
  const own = Math.min(worldSize, network.ranksPerNode);
  const names = ALGORITHMS.filter((name) => name !== "switch" || network.switch);
  return Math.min(...names.map((name) => algorithmSeconds(network, bytes, own, worldSize / own, name)));
}

function algorithmSeconds(network, bytes, own, nodes, name) {
  const inside = name === "switch" ? network.switch : network.inside;
  const card = { alpha: network.rail.alpha, beta: network.rail.beta / network.rails };
  if (name === "ring") {
    const worldSize = own * nodes;
    const crossing = nodes > 1 ? (steps("ring", worldSize) * nodes) / worldSize : 0;
    const latency = (steps("ring", worldSize) - crossing) * inside.alpha + crossing * card.alpha;
    const slowest = Math.max(inside.beta, nodes > 1 ? card.beta : 0);
    return inChunks(LAUNCH + latency, volume("ring", worldSize) * bytes * slowest);
  }
  const within = name === "tree" ? 2 * (own - 1) : steps("switch", own);
  const latency = within * inside.alpha + steps("tree", nodes) * card.alpha;
  const busiest = Math.max(volume(name, own) * inside.beta, volume("tree", nodes) * card.beta);
  return inChunks(LAUNCH + latency, (bytes * busiest) / (name === "tree" ? TREE : 1));
}

const inChunks = (latency, transfer) =>
  latency + transfer + Math.min(2 * Math.sqrt(latency * transfer), FILL * latency);

/**
 * Seconds of an all-reduce by a measured table, `points` of [bytes, seconds], ascending in both: a
 * straight line between two sizes; beyond the ends, that of the first or last doubling.
 */
export function measuredSeconds(points, bytes) {
  const [first, last] = [points[0], points.at(-1)];
  const line = ([left, early], [right, late]) => (late - early) / (right - left);
  if (bytes < first[0]) {
    const end = points.find(([size]) => size >= 2 * first[0]) ?? last;
    return first[1] - (first[0] - bytes) * Math.min(line(first, end), first[1] / first[0]);
  }
  if (bytes > last[0]) {
    const start = points.findLast(([size]) => 2 * size <= last[0]) ?? first;
    return last[1] + (bytes - last[0]) * (line(start, last) || last[1] / last[0]);
  }
  const next = Math.max(1, points.findIndex(([size]) => size >= bytes));
  return points[next - 1][1] + (bytes - points[next - 1][0]) * line(points[next - 1], points[next]);
}

/** The same links with another number of ranks, in a ring. */
export function measuredOn({ ranks, points }, worldSize) {
  const later = steps("ring", worldSize) / steps("ring", ranks);
  const longer = volume("ring", worldSize) / volume("ring", ranks);
  const beta = Math.min(...points.map(([size, time]) => time / size));
  const times = points.map(([size, time]) => later * (time - size * beta) + longer * size * beta);
  const rising = neverFalling(times);
  return points.map(([size], i) => [size, rising[i]]);
}

const median = (times) => [...times].sort((a, b) => a - b)[Math.floor((times.length - 1) / 2)];

/** The closest sequence that never falls: pools that do are joined to their median. */
function neverFalling(times) {
  const pools = [];
  for (const time of times) {
    pools.push([time]);
    while (pools.length > 1 && median(pools.at(-2)) > median(pools.at(-1))) {
      const joined = pools.splice(-2).flat();
      pools.push(joined);
    }
  }
  return pools.flatMap((pool) => pool.map(() => median(pool)));
}

const EXPECTED = "expected all that nccl-tests’ all_reduce_perf prints";

/** What all_reduce_perf of nccl-tests prints, as { ranks, points }; throws an Error of one line. */
export function readNcclTests(text) {
  const lines = text.split("\n").map((line) => line.replace(/^(\[\S*\d+,\d+\]<\w+>: ?|\d+: )/, ""));
  const words = lines.map((line) => line.replace(/^[\s#]+/, "").split(/\s+/).filter(Boolean));
  const columns = words.find((row) => ["size", "time", "algbw", "busbw"].every((name) => row.includes(name)));
  if (!columns) throw new Error(`${EXPECTED}: no line “# size count type redop … time algbw busbw” found`);
  const ranks = new Set(lines.map((line) => /^\s*#\s+Rank\s+(\d+)/.exec(line)?.[1]).filter(Boolean)).size;
  if (ranks < 2) throw new Error(`${EXPECTED}: of the lines “# Rank 0 …” ${ranks} found, 2 or more needed`);
  const times = new Map();
  lines.forEach((line, i) => {
    if (!/^\s*\d+\s+\d+\s/.test(line)) return;
    const row = line.trim().split(/\s+/);
    if (row.length !== columns.length) throw new Error(`${EXPECTED}: line ${i + 1} has ${row.length} columns, the header ${columns.length}`);
    const value = (name) => Number(row[columns.indexOf(name)]);
    const microseconds = Math.min(...columns.map((name, at) => (name === "time" ? Number(row[at]) : Infinity)));
    if (!(microseconds > 0)) throw new Error(`${EXPECTED}: line ${i + 1} has no time`);
    if (Math.abs(value("busbw") - volume("ring", ranks) * value("algbw")) > 0.02) {
      throw new Error(`${EXPECTED}: line ${i + 1} is not of an all-reduce of ${ranks} ranks, whose busbw is ${volume("ring", ranks).toFixed(2)} times algbw`);
    }
    const size = value("size");
    if (size > 0) times.set(size, [...(times.get(size) ?? []), microseconds * 1e-6]);
  });
  if (times.size < 2) throw new Error(`${EXPECTED}: two sizes or more needed, ${times.size} found`);
  const sizes = [...times.keys()].sort((a, b) => a - b);
  const rising = neverFalling(sizes.map((size) => median(times.get(size))));
  return { ranks, points: sizes.map((size, i) => [size, rising[i]]) };
}
