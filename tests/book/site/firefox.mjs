// A way through the sample in Firefox; prints what was seen as JSON: node firefox.mjs FOLDER FIREFOX ADDRESS

const [folder, executablePath, site] = process.argv.slice(2);
const library = "node_modules/puppeteer-core/lib/esm/puppeteer/puppeteer-core.js";
const { launch } = (await import(new URL(`${folder}/${library}`, "file:"))).default;
const patience = { timeout: 120_000, protocolTimeout: 120_000 };
const browser = await launch({ browser: "firefox", executablePath, headless: true, ...patience });
const page = await browser.newPage();
page.setDefaultTimeout(60_000);
const seen = { problems: [] };
page.on("pageerror", (error) => seen.problems.push(String(error)));

await page.setViewport({ width: 1280, height: 900 });
await page.goto(`${site}/index.html`);
await page.keyboard.press("/");
await page.waitForSelector("dialog.search[open]");
await page.keyboard.type("total / sum(weights)");
await page.waitForSelector("dialog.search li a");
await Promise.all([page.waitForNavigation(), page.click("dialog.search li a")]);
seen.found = page.url();

const apart = () => {
  const note = document.querySelector("main .notes > div");
  const line = document.getElementById(note.querySelector("a").hash.slice(1));
  return Math.abs(note.getBoundingClientRect().top - line.getBoundingClientRect().top);
};
await page.waitForFunction(`(${apart})() < 2`);
seen.noteIsBesideItsLine = true;

await page.setViewport({ width: 360, height: 800 });
seen.width = await page.evaluate(() => document.documentElement.scrollWidth);

await page.goto(`${site}/chapters/02-moving.html`);
const ring = await page.waitForSelector(".widget.ring-stepper");
const before = await ring.evaluate((element) => element.textContent);
await (await ring.waitForSelector("button[aria-label='One step forward']")).focus();
await page.keyboard.press("Enter");
seen.ringMoves = before !== (await ring.evaluate((element) => element.textContent));
await browser.close();
console.log(JSON.stringify(seen));
