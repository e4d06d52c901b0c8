// Reads what a GPU's memory holds, in both languages: node memory.js CHROMIUM URL [PICTURE]. Prints JSON.
import { chromium } from "playwright-core";

const [, , executablePath, url, picture] = process.argv;
const WAIT = { timeout: 60_000 };
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 1200, height: 800 }, colorScheme: "light", locale: "en-US" });
const problems = [];
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
page.on("pageerror", (error) => problems.push(error.stack));
await page.goto(url);
await page.waitForSelector("#link[data-state=live]", WAIT);
const memory = page.locator(".lane .memory");
await memory.first().waitFor({ state: "visible", ...WAIT });
const english = await memory.allTextContents();
if (picture) await page.screenshot({ path: picture, fullPage: true });
await page.click("#language");
await page.waitForFunction((before) => document.querySelector(".lane .memory").textContent !== before, english[0], WAIT);
console.log(JSON.stringify({ english, chinese: await memory.allTextContents(), problems }));
await browser.close();
