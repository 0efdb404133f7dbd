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
 * Seconds of an all-reduce by a measured table, `points` of [bytes, seconds], ascending in both:
 * a straight line between two sizes, and the last line beyond the ends.
 */
export function measuredSeconds(points, bytes) {
  const found = points.findIndex(([size]) => size >= bytes);
  const end = found < 0 ? points.length - 1 : Math.max(found, 1);
  const [[left, early], [right, late]] = [points[end - 1], points[end]];
  const beta = (late - early) / (right - left);
  if (early >= left * beta) return early + (bytes - left) * beta;
  return bytes >= left ? early + (bytes - left) * beta : (bytes * early) / left;
}
