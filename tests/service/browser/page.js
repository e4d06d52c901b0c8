// Drives the live page: node page.js CHROMIUM URL FOLDER_FOR_PICTURES. Prints what it saw as one JSON object.
import { chromium } from "playwright-core";

const [, , executablePath, url, pictures] = process.argv;
const WAIT = { timeout: 60_000 };
const TRIES = 4; // an answer may end just before its executor is killed
const seen = { problems: [], hosts: new Set() };
// In a container there is no sandbox for root, and the page is our own.
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });

async function open(options, name) {
  const context = await browser.newContext({ viewport: { width: 1200, height: 800 }, ...options });
  const page = await context.newPage();
  page.on("console", (message) => message.type() === "error" && seen.problems.push(`${name}: ${message.text()}`));
  page.on("pageerror", (error) => seen.problems.push(`${name}: ${error.stack}`));
  page.on("request", (request) => seen.hosts.add(new URL(request.url()).host));
  await page.goto(url);
  await page.waitForSelector("#link[data-state=live]", WAIT);
  await page.waitForSelector(".lane:nth-child(2)", WAIT);
  return page;
}

/** A chat by the keyboard alone, from the top of the page. */
async function chatByKeyboard(page) {
  for (let presses = 0; presses < 60; presses++) {
    await page.keyboard.press("Tab");
    if (await page.evaluate(() => document.activeElement.id === "prompt")) break;
  }
  await page.keyboard.type("What is 27 + 48?");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll(".answer dl dt").length >= 7, null, WAIT);
  return page.evaluate(() => ({
    text: document.querySelector(".answer .text").textContent,
    facts: [...document.querySelectorAll(".answer dl dt")].map((each) => each.textContent),
    events: [...document.querySelectorAll(".answer li")].map((each) => each.className),
  }));
}

/** Kill the executor of a chat that runs; returns what became of all four. */
async function killOne(page) {
  await page.click("#new");
  await page.fill("#max_tokens", "400");
  await page.click("#four");
  const found = await page.waitForFunction(() => {
    const running = [...document.querySelectorAll(".answer")].filter((each) => each.querySelector("button"));
    const joined = running.map((each) => each.querySelector("li.joined")?.textContent.match(/executor (\d+)/)?.[1]);
    return joined.find((each) => each !== undefined);
  }, null, WAIT);
  const index = await found.jsonValue();
  await page.locator(".lane", { hasText: `executor ${index}` }).locator("button.act").click();
  await page.waitForFunction(() => !document.querySelector(".answer .head button"), null, WAIT);
  return page.evaluate(() => [...document.querySelectorAll(".answer")].map((each) => ({
    events: [...each.querySelectorAll("li")].map((item) => item.className),
    ended: [...each.querySelectorAll("dd")].at(-1)?.textContent,
    error: each.querySelector(".away")?.textContent ?? null,
  })));
}

async function drive(page) {
  seen.chat = await chatByKeyboard(page);
  for (let tries = 0; tries < TRIES; tries++) {
    const answers = await killOne(page);
    seen.killed = answers;
    if (answers.some(({ events }) => events.includes("moved"))) break;
    await page.waitForFunction(() => !document.querySelector(".lane .state.bad"), null, WAIT);
  }
  await page.screenshot({ path: `${pictures}/page-light.png`, fullPage: true });
  await page.waitForFunction(() => document.querySelectorAll(".lane .state:not(.bad)").length === 2, null, WAIT);
}

/** What a reader of the screen's text gets, and whether blocks can be told by the keyboard. */
async function lookAtNames(page) {
  seen.names = await page.evaluate(() => ({
    unnamed: [...document.querySelectorAll("input, textarea, button")].filter(
      (each) => !(each.labels?.length || each.textContent.trim()),
    ).map((each) => each.outerHTML),
    canvases: [...document.querySelectorAll("canvas[role=img]")].map((each) => each.getAttribute("aria-label")),
  }));
  await page.focus(".lane canvas[tabindex]");
  await page.keyboard.press("ArrowRight");
  seen.block = await page.locator(".lane canvas[tabindex] + .under").first().textContent();
}

async function fits(page) {
  return page.evaluate(() => document.documentElement.scrollWidth <= innerWidth);
}

const light = await open({ colorScheme: "light", locale: "en-US" }, "light");
await drive(light);
await lookAtNames(light);
seen.address = light.url();
await light.click("#language");
seen.answer = await light.evaluate(() => [
  document.querySelector(".answer .you").textContent.split(" ")[0],
  ...[...document.querySelectorAll(".answer:first-child dt")].map((each) => each.textContent),
]);
const dark = await open({ colorScheme: "dark", locale: "zh-CN" }, "dark");
await dark.waitForTimeout(2500); // for the picture: a few columns and points
seen.chinese = [await dark.getAttribute("html", "lang"), await dark.textContent("#h-chat")];
await dark.screenshot({ path: `${pictures}/page-dark.png`, fullPage: true });
await dark.click("#language");
seen.english = [await dark.getAttribute("html", "lang"), await dark.textContent("#h-chat")];
const phone = await open({ viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true }, "phone");
await phone.waitForTimeout(2500);
seen.fits = [await fits(light), await fits(dark), await fits(phone)];
await phone.screenshot({ path: `${pictures}/page-phone.png`, fullPage: true });
seen.columns = await phone.evaluate(() => document.querySelectorAll(".chart .uplot").length);
await browser.close();
console.log(JSON.stringify({ ...seen, hosts: [...seen.hosts] }));
