// Draws the pages of one executor on a canvas of text: node draw.js FOLDER_OF_SCRIPTS < JSON. Prints JSON.
// In: width, executor (its state), lanes (of frames in a row), shown (pages whose words are wanted), names.
// Out: rows of letters, a dot where none was written; colours by page; note, label and words.
import { pathToFileURL } from "node:url";

const [, , folder] = process.argv;
const input = JSON.parse(await new Response(process.stdin).text());
const style = { getPropertyValue: (name) => name.slice(2) };
const canvas = {
  clientWidth: input.width, style: {}, fills: [], texts: [], attributes: {}, listeners: {},
  addEventListener(name, then) { this.listeners[name] = then; },
  setAttribute(name, value) { this.attributes[name] = value; },
  getContext: () => drawing,
};
const drawing = {
  setTransform() {}, strokeRect() {},
  clearRect() { canvas.fills = []; canvas.texts = []; },
  fillRect(x, y, size) { canvas.fills.push({ x, y, size, colour: this.fillStyle }); },
  fillText(text, x, y) { canvas.texts.push({ text, x, y }); },
};
Object.assign(globalThis, {
  matchMedia: () => ({ addEventListener() {} }),
  document: { documentElement: {} },
  getComputedStyle: () => style,
  localStorage: { getItem: () => "en" },
  devicePixelRatio: 1,
});
const { Blocks } = await import(pathToFileURL(`${folder}/blocks.js`));
const note = { textContent: "" };
const schedule = { labelOf: (sequence) => input.names[sequence], isMine: (sequence) => sequence === input.mine };
const blocks = new Blocks(canvas, note, schedule);
const { executor } = input;
blocks.count({ blocks: executor.blocks, cached: executor.cached_blocks, windows: executor.windows ?? [], size: executor.block_size });
for (const { blocks: states, pages, held, shared, kinds } of input.lanes) {
  if (pages) blocks.addPages(pages);
  else blocks.add(states);
  blocks.count({ held, shared, kinds });
}
blocks.draw(0);
const { size, columns } = blocks.grid;
const rows = [];
for (let first = 0; first < executor.blocks; first += columns) {
  rows.push(Array(Math.min(columns, executor.blocks - first)).fill("."));
}
for (const { text, x, y } of canvas.texts) rows[Math.floor(y / size)][Math.floor(x / size)] = text;
const drawn = { rows: rows.map((row) => row.join("")), colours: canvas.fills.map((fill) => fill.colour), note: note.textContent };
const words = input.shown.map((page) => {
  canvas.listeners.pointermove({ offsetX: (page % columns) * size + 1, offsetY: Math.floor(page / columns) * size + 1 });
  return note.textContent;
});
console.log(JSON.stringify({ ...drawn, label: canvas.attributes["aria-label"], words }));
