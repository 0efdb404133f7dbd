// A training step in time: instruments.simulator, function by function. No page in here.

export const MIB = 2 ** 20;

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

/** miniddp.bucket.plan_buckets for gradients of one kind, filled from the last one to the first. */
export function planBuckets(sizes, cap, firstCap) {
  const closed = [];
  let filling = [];
  let bytes = 0;
  for (let i = sizes.length - 1; i >= 0; i -= 1) {
    filling.push(i);
    bytes += sizes[i];
    if (bytes < (closed.length ? cap : firstCap)) continue;
    closed.push(filling);
    filling = [];
    bytes = 0;
  }
  return filling.length ? [...closed, filling] : closed;
}

/** The bytes of all gradients. A layer is { forward, backward, gradients }: seconds, and bytes. */
export const gradientBytes = (layers) => layers.flatMap((layer) => layer.gradients);

export const buckets = (layers, cap = 25 * MIB, firstCap = MIB) => planBuckets(gradientBytes(layers), cap, firstCap);

/** Layers that fill one bucket each, if compute makes as many bytes in every second. */
export function evenLayers(bucketBytes, forward, backward) {
  const total = sum(bucketBytes);
  return bucketBytes.map((size) => ({
    forward: (forward * size) / total, backward: (backward * size) / total, gradients: [size],
  })).reverse();
}

/**
 * A step: `spans` of the two streams, its `seconds`, and `compute`, `communication` and `exposed`
 * of them. `allReduce(bytes)` gives the seconds of a bucket; without a `plan` each gradient is one.
 */
export function simulate(layers, allReduce, plan = null, { overlapped = true, microBatches = 1, stolen = 0, slowest = 1 } = {}) {
  const sizes = gradientBytes(layers);
  const unsent = (plan ?? sizes.map((_, i) => [i]).reverse()).map((bucket, number) => ({ bucket, number }));
  const spans = [];
  let computed = 0;
  let arrived = 0;

  function compute(name, duration) {
    const travelling = Math.max(0, arrived - computed);
    let slowed = travelling * stolen;
    if (duration < travelling - slowed) slowed = (duration * stolen) / (1 - stolen);
    spans.push({ stream: "compute", name, start: computed, end: computed + duration + slowed });
    computed += duration + slowed;
  }

  let next = 0;
  function sendFullBuckets(madeFrom) {
    for (; next < unsent.length && unsent[next].bucket.every((i) => i >= madeFrom); next += 1) {
      const { bucket, number } = unsent[next];
      const start = Math.max(computed, arrived);
      arrived = start + allReduce(sum(bucket.map((i) => sizes[i])));
      spans.push({ stream: "communication", name: `bucket ${number}`, start, end: arrived });
    }
  }

  for (let number = 1; number <= microBatches; number += 1) {
    layers.forEach((layer, i) => compute(`forward ${i}`, layer.forward * slowest));
    let first = sizes.length;
    for (let i = layers.length - 1; i >= 0; i -= 1) {
      compute(`backward ${i}`, layers[i].backward * slowest);
      first -= layers[i].gradients.length;
      if (overlapped && number === microBatches) sendFullBuckets(first);
    }
  }
  sendFullBuckets(0);

  const seconds = Math.max(computed, arrived);
  const alone = microBatches * sum(layers.map((layer) => layer.forward + layer.backward));
  const communication = sum(spans.filter((span) => span.stream === "communication").map((span) => span.end - span.start));
  return { spans, seconds, compute: alone, communication, exposed: Math.max(0, seconds - alone) };
}

/**
 * The compute of the slowest of `count` ranks over that of a usual one, if what a rank takes is
 * 1 − spread + spread · E, E exponential with mean 1: mean 1, standard deviation `spread`. The
 * largest of n such E is expected to be the n-th harmonic number.
 */
export function slowestOf(count, spread) {
  let harmonic = 0;
  for (let i = count; i > 0; i -= 1) harmonic += 1 / i;
  return 1 + spread * (harmonic - 1);
}

const LLAMAS = { // finetune.model.SIZES: hidden, intermediate, layers, heads, key heads, vocabulary
  "360m": [960, 2560, 32, 15, 5, 49152],
};

/** The layers of a model of finetune.model in fp32; compute follows the weights that multiply. */
export function llamaLayers(size, forward, backward) {
  const [hidden, inner, count, heads, keyHeads, vocabulary] = LLAMAS[size];
  const keys = (hidden / heads) * keyHeads * hidden;
  const weights = [hidden * hidden, keys, keys, hidden * hidden, ...Array(3).fill(hidden * inner), hidden, hidden];
  const block = { forward: forward / count, backward: backward / count, gradients: weights.map((number) => 4 * number) };
  return [
    { forward: 0, backward: 0, gradients: [4 * vocabulary * hidden] },
    ...Array(count).fill(block),
    { forward: 0, backward: 0, gradients: [4 * hidden, 4 * 2 * hidden] },
  ];
}
