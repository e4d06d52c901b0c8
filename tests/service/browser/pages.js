// Looks at the pages of a pool with windows and states: node pages.js CHROMIUM URL. Prints what it saw as JSON.
import { chromium } from "playwright-core";

const [, , executablePath, url] = process.argv;
const WAIT = { timeout: 60_000 };
const problems = [];
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 1200, height: 800 }, colorScheme: "light", locale: "en-US" });
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
page.on("pageerror", (error) => problems.push(error.stack));
await page.goto(url);
await page.waitForSelector("#link[data-state=live]", WAIT);
console.log("live");
const notes = page.locator(".lane canvas[tabindex] + .under");
await page.waitForFunction(() => / [1-9]\d* of snapshots/.test(document.querySelector(".lane canvas[tabindex] + .under").textContent), null, WAIT);
const seen = { note: await notes.first().textContent(), label: await page.getAttribute(".lane canvas[tabindex]", "aria-label") };
seen.legend = await page.locator("#legend span").allTextContents();
seen.colours = await page.evaluate(() => {
  const canvas = document.querySelector(".lane canvas[tabindex]");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = new Set();
  for (let at = 0; at < data.length; at += 4) found.add(`${data[at]} ${data[at + 1]} ${data[at + 2]}`);
  const style = getComputedStyle(document.documentElement);
  const names = ["blue", "blue-soft", "cached", "free", "teal", "teal-cached", "gold", "gold-soft", "purple"];
  const rgb = (name) => style.getPropertyValue(`--${name}`).trim().match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16)).join(" ");
  return names.filter((name) => found.has(rgb(name)));
});
await page.focus(".lane canvas[tabindex]");
seen.words = [];
for (let number = 0; number < 60; number++) {
  await page.keyboard.press("ArrowRight");
  seen.words.push(await notes.first().textContent());
}
await browser.close();
console.log(JSON.stringify({ ...seen, problems }));
