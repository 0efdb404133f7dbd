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

/**
 * A step: `spans` of the two streams, its `seconds`, and `compute`, `communication` and `exposed`
 * of them. `allReduce(bytes)` gives the seconds of a bucket; without a `plan` each gradient is one.
 * `filling` and `emptying` are seconds per byte of a bucket, `optimizer` seconds.
 */
export function simulate(layers, allReduce, plan = null, {
  overlapped = true, microBatches = 1, stolen = 0, slowest = 1, filling = 0, emptying = 0, optimizer = 0,
} = {}) {
  const sizes = gradientBytes(layers);
  const unsent = (plan ?? sizes.map((_, i) => [i]).reverse()).map((bucket, number) => ({ bucket, number }));
  const spans = [];
  const sent = [];
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
      const bytes = sum(bucket.map((i) => sizes[i]));
      arrived = start + allReduce(bytes);
      sent.push({ number, bytes, arrival: arrived });
      spans.push({ stream: "communication", name: `bucket ${number}`, start, end: arrived });
    }
  }

  for (let number = 1; number <= microBatches; number += 1) {
    layers.forEach((layer, i) => compute(`forward ${i}`, layer.forward * slowest));
    const isLast = number === microBatches;
    let first = sizes.length;
    for (let i = layers.length - 1; i >= 0; i -= 1) {
      const { backward, gradients } = layers[i];
      compute(`backward ${i}`, backward * slowest + (isLast ? filling * sum(gradients) : 0));
      first -= gradients.length;
      if (overlapped && isLast) sendFullBuckets(first);
    }
  }
  sendFullBuckets(0);
  if (emptying > 0) {
    for (const { number, bytes, arrival } of sent) {
      computed = Math.max(computed, arrival);
      compute(`empty ${number}`, emptying * bytes);
    }
  }
  if (optimizer > 0) {
    computed = Math.max(computed, arrived);
    compute("optimizer", optimizer);
  }

  const seconds = Math.max(computed, arrived);
  const alone = microBatches * sum(layers.map((layer) => layer.forward + layer.backward)) + optimizer;
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
