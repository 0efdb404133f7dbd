// The theme toggle, the tooltips of terms and recorded values, the notes of listings, the search.
// Used by the Quarto build and by the plain build.

const root = document.documentElement;
const site = new URL("../", document.currentScript.src);
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

// What is kept in this browser; storage can be forbidden: it then lasts for this page.
function keep(name, value) {
  try {
    if (value) localStorage.setItem(name, value);
    else localStorage.removeItem(name);
  } catch {
    return;
  }
}

function kept(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

// Theme ---------------------------------------------------------------------------------------

const SUN = '<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M8 4.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7ZM7.3 0h1.4v2.6H7.3Zm0 13.4h1.4V16H7.3ZM0 7.3h2.6v1.4H0Zm13.4 0H16v1.4h-2.6ZM1.8 2.8l1-1 1.9 1.9-1 1Zm9.5 9.5 1-1 1.9 1.9-1 1ZM1.8 13.2l1.9-1.9 1 1-1.9 1.9Zm9.5-9.5 1.9-1.9 1 1-1.9 1.9Z"/></svg>';
const MOON = '<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M6.2 1.1a7 7 0 1 0 8.7 8.7A5.6 5.6 0 0 1 6.2 1.1Z"/></svg>';

const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark.matches);

function showTheme() {
  const dark = isDark();
  for (const button of document.querySelectorAll(".theme-toggle")) {
    button.setAttribute("aria-pressed", String(dark));
    button.innerHTML = dark ? SUN : MOON;
  }
}

function toggleTheme() {
  root.dataset.theme = isDark() ? "light" : "dark";
  keep("theme", root.dataset.theme);
  showTheme();
}

function addToggles() {
  const places = document.querySelectorAll("[data-theme-slot], .sidebar-search, .quarto-secondary-nav > div");
  for (const place of places) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "theme-toggle";
    button.title = "Dark theme";
    button.setAttribute("aria-label", "Dark theme");
    button.addEventListener("click", toggleTheme);
    place.append(button);
  }
  showTheme();
}

systemIsDark.addEventListener("change", showTheme);

// Tooltips ------------------------------------------------------------------------------------

let tips = 0;

// Without tippy: one element per tooltip, shown on hover and focus, hidden on leave and Escape.
function plainTip(owner, ...content) {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.id = `tip-${++tips}`;
  tip.role = "tooltip";
  tip.append(...content);
  tip.hidden = true;
  document.body.append(tip);
  owner.setAttribute("aria-describedby", tip.id);

  let leaving;
  const show = () => {
    clearTimeout(leaving);
    tip.hidden = false;
    const place = owner.getBoundingClientRect();
    const below = place.bottom + tip.offsetHeight + 8 < innerHeight || place.top < tip.offsetHeight + 8;
    const left = Math.min(place.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${scrollX + Math.max(8, left)}px`;
    tip.style.top = `${scrollY + (below ? place.bottom + 6 : place.top - tip.offsetHeight - 6)}px`;
  };
  const hide = () => {
    tip.hidden = true;
  };
  const leave = () => {
    leaving = setTimeout(hide, 150);
  };
  for (const element of [owner, tip]) {
    element.addEventListener("mouseenter", show);
    element.addEventListener("mouseleave", leave);
  }
  owner.addEventListener("focus", show);
  owner.addEventListener("blur", hide);
  return { isShown: () => !tip.hidden, show, hide };
}

function tippyTip(owner, text) {
  const tip = window.tippy(owner, {
    content: text,
    theme: "quarto",
    placement: "bottom-start",
    arrow: false,
    interactive: true,
    delay: [100, 0],
    appendTo: document.body,
    // An interactive tippy sets no description by itself.
    aria: { content: "describedby", expanded: false },
  });
  return { isShown: () => tip.state.isShown, show: () => tip.show(), hide: () => tip.hide() };
}

const shown = [];

function addTip(owner) {
  if (!owner.matches("a[href], button")) owner.tabIndex = 0;
  const tip = window.tippy ? tippyTip(owner, owner.dataset.tip) : plainTip(owner, owner.dataset.tip);
  shown.push(tip);

  // A first touch shows the definition, a second one follows the link.
  let wasShown = false;
  owner.addEventListener("pointerdown", () => {
    wasShown = tip.isShown();
  });
  owner.addEventListener("click", (event) => {
    if (event.pointerType !== "touch" || wasShown) return;
    event.preventDefault();
    tip.show();
  });
}

// Notes of listings ----------------------------------------------------------------------------

const lineOf = (note) => document.getElementById(note.querySelector("dt a").hash.slice(1));

// Beside the code, each note stands at the height of its line or below the note before it.
function alignNotes() {
  const notes = [...document.querySelectorAll(".notes > div")];
  for (const note of notes) note.style.marginTop = "";
  const measured = notes.map((note) => {
    const beside = note.parentElement.offsetLeft > 0;
    const wanted = lineOf(note).getBoundingClientRect().top;
    return { note, beside, wanted, place: note.getBoundingClientRect().top, list: note.parentElement };
  });
  let moved = 0;
  let list;
  for (const { note, beside, wanted, place, list: own } of measured) {
    if (own !== list) moved = 0;
    list = own;
    const down = beside ? Math.max(0, wanted - place - moved) : 0;
    moved += down;
    note.style.marginTop = down ? `${down}px` : "";
    own.classList.add("placed");
  }
}

// Pointing at a note, or coming to it with the keyboard, lights its line, and the other way round.
function lightNotes() {
  for (const note of document.querySelectorAll(".notes > div")) {
    const line = lineOf(note);
    const light = (on) => [note, line].forEach((element) => element.classList.toggle("lit", on));
    for (const element of [note, line]) {
      element.addEventListener("pointerenter", () => light(true));
      element.addEventListener("pointerleave", () => light(false));
    }
    note.addEventListener("focusin", () => light(true));
    note.addEventListener("focusout", () => light(false));
    line.addEventListener("click", () => note.scrollIntoView({ block: "nearest" }));
  }
}

// While notes stand beside the code, the contents of the page are not seen.
function makeContentsYield() {
  const contents = document.querySelector(".page-toc, #quarto-margin-sidebar");
  const seen = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      isIntersecting && target.offsetLeft > 0 ? seen.add(target) : seen.delete(target);
    }
    contents?.classList.toggle("yields", seen.size > 0);
  });
  document.querySelectorAll(".notes").forEach((notes) => observer.observe(notes));
}

// Copying -------------------------------------------------------------------------------------

// What a quote needs to run stands unseen at the head of its code: a copy button takes it along. For
// what changes between two files that is the whole new file, and nothing else is taken.
function putNeedsBeforeQuotes() {
  for (const quote of document.querySelectorAll("main .code[data-before]")) {
    const needs = document.createElement("span");
    needs.style.display = "none";
    needs.textContent = quote.dataset.before;
    quote.querySelector("pre > code").prepend(needs);
  }
}

// Search --------------------------------------------------------------------------------------

const GLASS = '<svg viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width="1.4" stroke-linecap="round" aria-hidden="true"><circle cx="7" cy="7" r="4.5"/><path d="m10.5 10.5 4 4"/></svg>';

// Its script and its index come with the first use; what is typed until then is kept.
async function openSearch() {
  let typed = "";
  const keepKey = (event) => {
    if (event.key.length > 1 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    typed += event.key;
  };
  document.addEventListener("keydown", keepKey, true);
  try {
    const { open } = await import("./search.js");
    open(typed || new URLSearchParams(location.search).get("q"));
  } finally {
    document.removeEventListener("keydown", keepKey, true);
  }
}

function addSearch() {
  for (const place of document.querySelectorAll("[data-search-slot], #quarto-search")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "search-button";
    button.innerHTML = `${GLASS}Search<kbd>/</kbd>`;
    button.addEventListener("click", openSearch);
    place.replaceWith(button);
  }
  document.querySelector(".quarto-search-button")?.addEventListener("click", openSearch);
  document.addEventListener("keydown", (event) => {
    const busy = event.target.closest?.("input, select, textarea, dialog, [contenteditable]");
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || busy) return;
    event.preventDefault();
    openSearch();
  });
  if (new URLSearchParams(location.search).has("q")) openSearch();
}

// Reading on ------------------------------------------------------------------------------------

const page = location.pathname.slice(site.pathname.length);

// On leaving a page its section is kept, and the first page leads back to it.
function keepPlace() {
  const heading = [...document.querySelectorAll("main :is(h2, h3)")]
    .filter((each) => each.getBoundingClientRect().top < innerHeight / 2)
    .pop();
  const id = heading?.id || heading?.closest("section[id]")?.id;
  if (!id) return;
  const title = `${document.querySelector("main h1").textContent.trim()}: ${heading.textContent.trim()}`;
  keep("place", JSON.stringify({ address: `${page}#${id}`, title }));
}

function leadToPlace() {
  const place = JSON.parse(kept("place"));
  if (!place) return;
  const link = document.createElement("a");
  link.href = new URL(place.address, site);
  link.textContent = place.title;
  const line = document.createElement("p");
  line.className = "read-on";
  line.append("Read on at ", link);
  (document.querySelector("#title-block-header") ?? document.querySelector("main h1")).after(line);
}

// A box for the reader to tick. What is ticked is kept, and nothing else.
function addTicks() {
  for (const exercise of document.querySelectorAll("main .exercise[id]")) {
    const name = `done ${page}#${exercise.id}`;
    const tick = document.createElement("input");
    tick.type = "checkbox";
    tick.checked = kept(name) !== null;
    tick.addEventListener("change", () => keep(name, tick.checked && "yes"));
    const label = document.createElement("label");
    label.className = "done";
    label.append(tick, "Done");
    exercise.querySelector(".box-title").append(label);
  }
}

// Reading without a mouse -----------------------------------------------------------------------

// What scrolls sideways can be reached with the keyboard, then scrolled with the arrow keys.
function makeScrollersReachable() {
  const blocks = [...document.querySelectorAll("main pre > code, main table, main math[display=block]")];
  const scrolling = new Set(blocks.filter((block) => block.scrollWidth > block.clientWidth));
  for (const block of blocks) {
    if (scrolling.has(block)) block.tabIndex = 0;
    else block.removeAttribute("tabindex");
  }
}

function layOut() {
  makeScrollersReachable();
  alignNotes();
}

// Quarto's page frame, told apart for screen readers. Its menus hold the header still by a script in the page,
// which the content security policy does not run.
function nameLandmarks() {
  for (const menu of document.querySelectorAll("#quarto-header [data-bs-toggle=collapse]")) {
    menu.addEventListener("click", () => window.quartoToggleHeadroom?.());
  }
  document.querySelector("#quarto-sidebar")?.setAttribute("aria-label", "Chapters");
  document.querySelector("#TOC")?.setAttribute("aria-label", "On this page");
  document.querySelector(".quarto-secondary-nav")?.setAttribute("aria-label", "Page header");
  // Bootstrap's tabs are links without an address, which the keyboard cannot reach.
  for (const tab of document.querySelectorAll("a[role=tab][data-bs-target]")) {
    tab.setAttribute("href", tab.dataset.bsTarget);
  }
  const glass = document.querySelector("#quarto-sidebar-glass");
  glass?.setAttribute("role", "button");
  glass?.setAttribute("aria-label", "Close the menu");
  for (const link of document.querySelectorAll("a[data-bs-toggle][role=navigation]")) {
    link.setAttribute("role", "button");
    link.tabIndex = 0;
  }
}

document.addEventListener("keydown", (event) => {
  const target = event.target.closest?.("[role=button][data-bs-toggle]:not(button)");
  if (!target || (event.key !== "Enter" && event.key !== " ")) return;
  event.preventDefault();
  target.click();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  window.tippy?.hideAll?.();
  for (const tip of shown) tip.hide();
});

addToggles();
putNeedsBeforeQuotes();
nameLandmarks();
addSearch();
addTicks();
if (page === "" || page === "index.html") leadToPlace();
else addEventListener("pagehide", keepPlace);
document.querySelectorAll("[data-tip]").forEach(addTip);

lightNotes();
makeContentsYield();
layOut();

addEventListener("load", layOut);
addEventListener("resize", layOut);
document.addEventListener("toggle", layOut, true);
document.addEventListener("shown.bs.tab", layOut);
