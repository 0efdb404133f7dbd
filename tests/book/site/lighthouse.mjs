// Looks at pages with Lighthouse in one browser and prints what it found, a line of JSON for each:
// node lighthouse.mjs FOLDER BROWSER desktop|phone CATEGORIES ADDRESS…

const [folder, chromePath, screen, categories, ...addresses] = process.argv.slice(2);
const library = (path) => import(new URL(`${folder}/node_modules/${path}`, "file:"));
const { default: lighthouse, desktopConfig } = await library("lighthouse/core/index.js");
const { launch } = await library("chrome-launcher/dist/index.js");

const chrome = await launch({ chromePath, chromeFlags: ["--headless=new", "--no-sandbox"] });
const config = screen === "phone" ? undefined : desktopConfig;
const untimed = { pauseAfterLoadMs: 0, networkQuietThresholdMs: 0, cpuQuietThresholdMs: 0, throttlingMethod: "provided" };
const flags = {
  port: chrome.port,
  onlyCategories: categories.split(","),
  disableFullPageScreenshot: true,
  ...(categories.includes("performance") ? {} : untimed),
};

function failedAudits({ categories, audits }) {
  const failed = new Set();
  for (const { auditRefs } of Object.values(categories)) {
    for (const { id, weight } of auditRefs) if (weight && audits[id].score !== null && audits[id].score < 0.9) failed.add(id);
  }
  return [...failed].map((id) => {
    const { displayValue, details } = audits[id];
    const places = (details?.items ?? []).slice(0, 3).map(({ node, url }) => node?.snippet ?? url);
    return [id, displayValue, ...places].filter(Boolean).join(" ");
  });
}

for (const address of addresses) {
  const { lhr } = await lighthouse(address, flags, config);
  const requests = lhr.audits["network-requests"]?.details.items ?? [];
  const found = {
    address,
    error: lhr.runtimeError?.message,
    scores: Object.fromEntries(Object.values(lhr.categories).map(({ id, score }) => [id, Math.round(100 * score)])),
    failed: failedAudits(lhr),
    requests: requests.length,
    bytes: requests.reduce((sum, { resourceSize }) => sum + resourceSize, 0),
  };
  console.log(JSON.stringify(found));
}
await chrome.kill();
