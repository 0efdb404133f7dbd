// What a rank of data-parallel.js computes: two spirals, a network that tells them apart, Adam.
// A worker loads it too, so there is no page in it. tests/book/vis compares it with torch.

const SIZES = [2, 16, 16, 1];
const TURNS = 1.5;

/** Numbers from 0 to 1 that look random: a linear congruential generator (Numerical Recipes). */
export function uniform(seed) {
  let state = seed >>> 0;
  const next = () => {
    state = (Math.imul(1664525, state) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
  next();
  return next;
}

/** `count` points [x, y, spiral]: one spiral, then the other, each from the inside outwards. */
export function spirals(count) {
  const random = uniform(1);
  const noise = () => 0.1 * (random() - 0.5);
  return Array.from({ length: count }, (_, i) => {
    const spiral = Number(i >= count / 2);
    const along = ((i % (count / 2)) + 8) / (count / 2 + 8);
    const angle = 2 * Math.PI * (TURNS * along + spiral / 2);
    return [along * Math.cos(angle) + noise(), along * Math.sin(angle) + noise(), spiral];
  });
}

/** What each rank gets: every `ranks`-th sample; uneven, rank 0 all but eight for each other rank. */
export function parts(samples, ranks, uneven) {
  if (!uneven) return Array.from({ length: ranks }, (_, rank) => samples.filter((_, i) => i % ranks === rank));
  const end = samples.length - 8 * (ranks - 1);
  return Array.from({ length: ranks }, (_, rank) =>
    rank === 0 ? samples.slice(0, end) : samples.slice(end + 8 * (rank - 1), end + 8 * rank));
}

/** All weights in a row, as torch's Linear layers draw them: uniform within 1 / √inputs. */
export function initialWeights(seed) {
  const random = uniform(seed);
  return Float64Array.from(layers().flatMap(({ inputs, outputs }) =>
    Array.from({ length: outputs * inputs + outputs }, () => (2 * random() - 1) / Math.sqrt(inputs))));
}

/** Where each layer's weights (outputs × inputs) and biases begin in the row. */
function layers() {
  let start = 0;
  return SIZES.slice(1).map((outputs, i) => {
    const inputs = SIZES[i];
    const layer = { inputs, outputs, weight: start, bias: start + outputs * inputs };
    start = layer.bias + outputs;
    return layer;
  });
}

/** A layer's outputs: the sums, or their tanh. */
function forward(weights, { inputs, outputs, weight, bias }, values, isLast) {
  const found = new Float64Array(outputs);
  for (let o = 0; o < outputs; o += 1) {
    let sum = weights[bias + o];
    for (let k = 0; k < inputs; k += 1) sum += weights[weight + o * inputs + k] * values[k];
    found[o] = isLast ? sum : Math.tanh(sum);
  }
  return found;
}

/** Adds a layer's gradients, given those of its sums; returns those of the sums before it. */
function backward(weights, gradient, { inputs, outputs, weight, bias }, values, above) {
  const below = new Float64Array(inputs);
  for (let o = 0; o < outputs; o += 1) {
    gradient[bias + o] += above[o];
    for (let k = 0; k < inputs; k += 1) {
      gradient[weight + o * inputs + k] += above[o] * values[k];
      below[k] += above[o] * weights[weight + o * inputs + k];
    }
  }
  for (let k = 0; k < inputs; k += 1) below[k] *= 1 - values[k] ** 2; // tanh' = 1 − tanh²
  return below;
}

/** The mean of the binary cross-entropy over the samples, and its gradient. */
export function lossAndGradient(weights, samples) {
  const gradient = new Float64Array(weights.length);
  const net = layers();
  const last = net.length - 1;
  let loss = 0;
  for (const [x, y, label] of samples) {
    const values = [[x, y]];
    for (let i = 0; i <= last; i += 1) values.push(forward(weights, net[i], values[i], i === last));
    const [logit] = values.at(-1);
    loss += (Math.max(logit, 0) - logit * label + Math.log1p(Math.exp(-Math.abs(logit)))) / samples.length;
    let above = [(1 / (1 + Math.exp(-logit)) - label) / samples.length];
    for (let i = last; i >= 0; i -= 1) above = backward(weights, gradient, net[i], values[i], above);
  }
  return { loss, gradient };
}

/** torch.optim.Adam with its defaults, but for the learning rate: `step(weights, gradient)`. */
export function adam(length, rate = 0.004) {
  const [mean, square] = [new Float64Array(length), new Float64Array(length)];
  let count = 0;
  return (weights, gradient) => {
    count += 1;
    for (let i = 0; i < length; i += 1) {
      mean[i] = 0.9 * mean[i] + 0.1 * gradient[i];
      square[i] = 0.999 * square[i] + 0.001 * gradient[i] ** 2;
      const deviation = Math.sqrt(square[i]) / Math.sqrt(1 - 0.999 ** count) + 1e-8;
      weights[i] -= (rate / (1 - 0.9 ** count)) * (mean[i] / deviation);
    }
  };
}

/**
 * Replaces the vector by its mean over all ranks, around a ring (miniddp.ring.all_reduce). `send`
 * takes a chunk for the right neighbour, `receive` promises the next one of the left.
 */
export async function allReduceMean(vector, rank, size, send, receive) {
  for (let i = 0; i < vector.length; i += 1) vector[i] /= size;
  const [each, more] = [Math.floor(vector.length / size), vector.length % size];
  const start = (chunk) => chunk * each + Math.min(chunk, more);
  const at = (number) => {
    const chunk = ((number % size) + size) % size;
    return vector.subarray(start(chunk), start(chunk + 1));
  };
  for (let step = 0; step < size - 1; step += 1) {
    send(at(rank - step - 1).slice());
    const arrived = await receive();
    const own = at(rank - step - 2);
    for (let i = 0; i < own.length; i += 1) own[i] += arrived[i];
  }
  for (let step = 0; step < size - 1; step += 1) {
    send(at(rank - step).slice());
    at(rank - step - 1).set(await receive());
  }
}

/** The same mean up to rounding: each rank adds the vectors itself, its own first, then its left's. */
export async function meanInOwnOrder(vector, rank, size, send, receive) {
  for (let i = 0; i < vector.length; i += 1) vector[i] /= size;
  let passing = vector.slice();
  for (let step = 0; step < size - 1; step += 1) {
    send(passing);
    passing = await receive();
    for (let i = 0; i < vector.length; i += 1) vector[i] += passing[i];
  }
}
