// The search: the sections of the book that hold what is typed. Names of code and error messages are found as they
// stand. A message with the paths and numbers of a reader's own run is found by most of its words, or by a phrase.

const SHOWN = 15;
const ENOUGH = 0.6; // of the words
const PHRASE = 3; // words in a row
const AROUND = 90; // characters

const site = new URL("../", import.meta.url);
const flat = (text) => text.replace(/\s+/g, " ").trim();

const lettersOf = (text) => text.toLowerCase().split(/[^\p{L}\p{N}_]+/u).join(" ");
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

async function readIndex() {
  const sections = await (await fetch(new URL("search.json", site))).json();
  return sections.map(({ href, title, section, text }) => {
    const place = flat(section ? `${title}: ${section}` : title);
    const content = flat(text);
    const searched = `${place} ${content}`.toLowerCase();
    return { href, place, content, searched, letters: lettersOf(searched) };
  });
}

// The words of a query; numbers are others in each run that fails.
function wordsOf(query) {
  return lettersOf(query).split(" ").filter((word) => word.length > 1 && !/^\d+$/.test(word));
}

// How much a word tells: little if many sections have it.
function weightIn(sections, word) {
  const having = sections.filter(({ letters }) => letters.includes(word)).length;
  return Math.log(sections.length / Math.max(1, having));
}

// The words that stand in a text in this order, from a place in the query on.
function runFrom(start, words, letters) {
  let end = start;
  while (end < words.length && letters.includes(words.slice(start, end + 1).join(" "))) end += 1;
  return end - start;
}

// How well a section answers; 0 if it does not.
function score({ place, searched, letters }, wanted, words, weights) {
  const exact = searched.includes(wanted);
  const runs = words.map((_, start) => runFrom(start, words, letters));
  const found = runs.filter((run) => run > 0).length;
  if (!exact && Math.max(0, ...runs) < PHRASE && (found === 0 || found < ENOUGH * words.length)) return 0;
  const told = sum(weights.filter((_, i) => runs[i] > 0));
  const longest = Math.max(0, ...runs.map((run, start) => sum(weights.slice(start, start + run))));
  const named = place.toLowerCase().includes(wanted);
  return (told + longest) / (2 * sum(weights) || 1) + exact + named;
}

export function find(sections, query) {
  const wanted = flat(query).toLowerCase();
  if (wanted.length < 2) return [];
  const words = wordsOf(wanted);
  const weights = words.map((word) => weightIn(sections, word));
  return sections
    .map((section) => ({ section, points: score(section, wanted, words, weights) }))
    .filter(({ points }) => points > 0)
    .sort((one, other) => other.points - one.points)
    .slice(0, SHOWN)
    .map(({ section }) => section);
}

// The text around the first match of all that is typed or else of its longest word there, with the match marked.
function excerpt({ content }, query) {
  const wanted = flat(query).toLowerCase();
  const lower = content.toLowerCase();
  const longestFirst = wordsOf(wanted).sort((one, other) => other.length - one.length);
  const match = [wanted, ...longestFirst].find((text) => lower.includes(text)) ?? "";
  const start = match ? lower.indexOf(match) : 0;
  const mark = document.createElement("mark");
  mark.textContent = content.slice(start, start + match.length);
  const line = document.createElement("p");
  const before = content.slice(Math.max(0, start - AROUND), start);
  const after = content.slice(start + match.length, start + match.length + AROUND);
  line.append(start > AROUND ? "…" : "", before, mark, after);
  return line;
}

function result(section, query) {
  const link = document.createElement("a");
  link.href = new URL(section.href, site);
  link.textContent = section.place;
  link.addEventListener("click", () => dialog.close());
  const item = document.createElement("li");
  item.append(link, excerpt(section, query));
  return item;
}

const dialog = document.createElement("dialog");
dialog.className = "search";
dialog.setAttribute("aria-label", "Search the book");
dialog.innerHTML = `<form method="dialog">
  <input type="search" aria-label="Search the book" autocomplete="off" spellcheck="false"
    placeholder="A word, a name of code, an error message"><button>Close</button>
</form><p role="status"></p><ol></ol>`;
document.body.append(dialog);

const [input, status, list] = ["input", "[role=status]", "ol"].map((name) => dialog.querySelector(name));
const sections = readIndex();

async function show() {
  const found = find(await sections, input.value);
  list.replaceChildren(...found.map((section) => result(section, input.value)));
  status.textContent = input.value.trim() ? `${found.length || "No"} ${found.length === 1 ? "place" : "places"}` : "";
}

input.addEventListener("input", show);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  list.querySelector("a")?.click();
});

// Up and down move through the results.
dialog.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const stops = [input, ...list.querySelectorAll("a")];
  const next = stops[stops.indexOf(document.activeElement) + step];
  event.preventDefault();
  next?.focus();
});

export function open(query) {
  if (!dialog.open) dialog.showModal();
  input.focus();
  if (query) input.value = query;
  else input.select();
  show();
}
