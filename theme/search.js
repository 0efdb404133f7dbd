// The search: the sections of the book that hold what is typed. Error messages, as they were printed, and names
// of code are found as they stand; where no section has all the words, those with most of them are shown.

const SHOWN = 15;
const ENOUGH = 0.6; // of the words
const AROUND = 90; // characters

const site = new URL("../", import.meta.url);
const flat = (text) => text.replace(/\s+/g, " ").trim();

async function readIndex() {
  const sections = await (await fetch(new URL("search.json", site))).json();
  return sections.map(({ href, title, section, text }) => {
    const place = flat(section ? `${title}: ${section}` : title);
    const content = flat(text);
    return { href, place, content, searched: `${place} ${content}`.toLowerCase() };
  });
}

// How well a section answers; 0 if it does not.
function score({ place, searched }, wanted, words) {
  const found = words.filter((word) => searched.includes(word)).length / words.length;
  if (found < ENOUGH) return 0;
  const exact = searched.includes(wanted) ? 2 : 0;
  const named = place.toLowerCase().includes(wanted) ? 1 : 0;
  return found + exact + named;
}

export function find(sections, query) {
  const wanted = flat(query).toLowerCase();
  if (wanted.length < 2) return [];
  const words = wanted.split(" ");
  return sections
    .map((section) => ({ section, points: score(section, wanted, words) }))
    .filter(({ points }) => points > 0)
    .sort((one, other) => other.points - one.points)
    .slice(0, SHOWN)
    .map(({ section }) => section);
}

// The text around the first match, with the match marked.
function excerpt({ content }, query) {
  const wanted = flat(query).toLowerCase();
  const lower = content.toLowerCase();
  const match = [wanted, ...wanted.split(" ")].find((text) => lower.includes(text)) ?? "";
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
