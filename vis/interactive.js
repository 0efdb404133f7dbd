// What the moving diagrams share: they take the place of their still, and speak one language of
// controls, numbers and colours. README.md says how one is built.

const reduced = matchMedia("(prefers-reduced-motion: reduce)");

/** Whether things may move across the page. */
export const mayMove = () => !reduced.matches;

/** The colour of a rank, the same on every page. */
export const colourOf = (rank) => `var(--rank-${rank % 8})`;

/**
 * Puts `build(data)` in the place of every still of the page that belongs to the module `name`.
 * `data` is the JSON that the page gives, or null. If anything fails the still stays.
 */
export function mount(name, build) {
  for (const stage of document.querySelectorAll(`.stage[data-module="${name}"]`)) {
    const data = stage.querySelector("script[type='application/json']");
    const widget = build(data && JSON.parse(data.textContent));
    stage.querySelector(".still").replaceWith(widget);
  }
}

// Elements ------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) made.style.setProperty(key, text);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return made;
}

/** An HTML element; an attribute that is a function listens to the event of its name. */
export const html = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** The round badge of a rank, with its number in it. */
export const badge = (rank) =>
  html("span", { class: "rank-badge", style: { "--rank": colourOf(rank) } }, String(rank));

// Controls ------------------------------------------------------------------------------------

let groups = 0;

/** One of several: `options` maps each value to its label. `change(value)` hears of a choice. */
export function choice(label, options, chosen, change) {
  const name = `choice-${++groups}`;
  const items = [...options].map(([value, text]) =>
    html("label", {},
      html("input", { type: "radio", name, value: String(value), checked: value === chosen, change: () => change(value) }),
      html("span", {}, text)));
  return html("fieldset", { class: "choice" }, html("legend", {}, label), html("div", {}, items));
}

/** A slider whose value stands beside its label. `show(value)` may put it in words. */
export function slider(label, { min, max, value, step = 1, show = String }, input) {
  const output = html("output", {}, show(value));
  const range = html("input", {
    type: "range", min, max, step, value, "aria-valuetext": show(value),
    input: () => {
      set(Number(range.value));
      input(Number(range.value));
    },
  });
  const set = (number) => {
    range.value = number;
    output.textContent = show(number);
    range.setAttribute("aria-valuetext", show(number));
  };
  const field = html("label", { class: "slider" }, html("span", {}, label, " ", output), range);
  return Object.assign(field, { range, set });
}

/** A number to type. `input(number)` hears of numbers within the bounds only. */
export function number(label, { min, max, value, step = "any", unit = "" }, input) {
  const box = html("input", {
    type: "number", min, max, step, value, required: true, inputmode: "decimal",
    input: () => box.validity.valid && input(Number(box.value)),
  });
  const field = html("label", { class: "number" },
    html("span", {}, label), html("span", {}, box, unit && html("small", {}, unit)));
  return Object.assign(field, { box });
}

export const button = (label, text, click) =>
  html("button", { type: "button", "aria-label": label, title: label, click }, text);

// Numbers -------------------------------------------------------------------------------------

const digits = (value) => (value >= 100 ? 0 : value >= 10 ? 1 : 2);

function withUnit(value, units, factor) {
  let power = 0;
  while (power < units.length - 1 && Math.abs(value) >= 0.9995 * factor) {
    value /= factor;
    power += 1;
  }
  return `${Number(value.toFixed(digits(Math.abs(value))))}\u00a0${units[power]}`;
}

/** 0.00125 → "1.25 ms" */
export const seconds = (value) =>
  value >= 0.9995 || value === 0 ? `${Number(value.toFixed(digits(value)))}\u00a0s`
    : withUnit(value * 1e6, ["µs", "ms"], 1000);

/** 1500 → "1.5 kB": powers of 1000, as memory and networks are sold. */
export const bytes = (value) => withUnit(value, ["B", "kB", "MB", "GB", "TB"], 1000);

/** 1572864 → "1.5 MiB": powers of 1024, as buckets are measured. */
export const binaryBytes = (value) => withUnit(value, ["B", "KiB", "MiB", "GiB"], 1024);

export const percent = (part) => `${(100 * part).toFixed(part < 0.0995 || part > 0.9905 ? 1 : 0)}\u00a0%`;

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/** A round distance between marks, so that there are `most` at most between 0 and `end`. */
export function tick(end, most) {
  const power = 10 ** Math.floor(Math.log10(end / most));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => end / step <= most);
}
