// A rank of data-parallel.js: a web worker with its own samples, weights and optimizer.

import { adam, allReduceMean, lossAndGradient, meanInOwnOrder } from "./spirals.js";

const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** `send(chunk)` to the right, and `receive()`, the promise of the next chunk from the left. */
function neighbours([left, right]) {
  const [arrived, waiting] = [[], []];
  left.onmessage = ({ data }) => (waiting.length ? waiting.shift()(data) : arrived.push(data));
  return {
    send: (chunk) => right.postMessage(chunk, [chunk.buffer]),
    receive: () => (arrived.length ? Promise.resolve(arrived.shift()) : new Promise((resolve) => waiting.push(resolve))),
  };
}

onmessage = async ({ data }) => {
  const { rank, size, ports, weights, samples, steps, every, sync, ownOrder, delay, last } = data;
  const { send, receive } = ports ? neighbours(ports) : {};
  const average = ownOrder ? meanInOwnOrder : allReduceMean;
  const update = adam(weights.length);
  for (let step = 1; step <= Math.min(steps, last); step += 1) {
    const { gradient } = lossAndGradient(weights, samples);
    if (delay) await wait(delay);
    if (sync && size > 1) await average(gradient, rank, size, send, receive);
    update(weights, gradient);
    if (step % every === 0 || step === steps) postMessage({ rank, step, weights: weights.slice() });
  }
};
