// The KV blocks of one executor, or its pages: a cell for each, or for a few of them in a large pool.
import { colour, context } from "./colours.js";
import { CACHED, letterOf, looksOf, wordsOf } from "./pages.js";
import { number, word } from "./words.js";

const MAX_HEIGHT = 150;
const [LARGEST, SMALLEST] = [13, 3];
const LETTERS = 9; // the least size of cells with letters

export class Blocks {
  constructor(canvas, note, schedule) {
    this.canvas = canvas;
    this.note = note;
    this.schedule = schedule; // knows the labels
    this.cursor = null;
    this.clear();
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.show(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.show(null));
  }

  clear() {
    this.states = new Map(); // block: [holder, holders]
    this.pages = null; // page: what it holds, on an executor with windows or states
    this.facts = { held: 0, shared: 0, blocks: 0, cached: 0, windows: [], size: 0, kinds: {} };
  }

  add(states) {
    this.pages = null;
    for (let place = 0; place < states.length; place += 3) {
      const [block, holder, holders] = states.slice(place, place + 3);
      if (holder === 0) this.states.delete(block);
      else this.states.set(block, [holder, holders]);
    }
  }

  addPages(states) {
    this.states.clear();
    this.pages ??= new Map();
    for (let place = 0; place < states.length; place += 5) {
      const [page, holder, holders, kind, position] = states.slice(place, place + 5);
      if (holder === 0) this.pages.delete(page);
      else this.pages.set(page, { holder, holders, kind, position });
    }
  }

  /** held and shared as the records say, blocks and cached as the server does. */
  count(facts) {
    Object.assign(this.facts, facts);
  }

  layout(width) {
    const total = this.facts.blocks;
    for (let size = LARGEST; size >= SMALLEST; size--) {
      const most = Math.max(1, Math.floor(width / size));
      const rows = Math.max(1, Math.ceil(total / most));
      if (rows * size <= MAX_HEIGHT) return { size, columns: Math.max(1, Math.ceil(total / rows)), per: 1 };
    }
    const columns = Math.max(1, Math.floor(width / SMALLEST));
    return { size: SMALLEST, columns, per: Math.ceil(total / columns / Math.floor(MAX_HEIGHT / SMALLEST)) };
  }

  draw(index) {
    const { blocks, held, shared, cached } = this.facts;
    const { size, columns, per } = (this.grid = this.layout(this.canvas.clientWidth));
    const cells = Math.ceil(blocks / per);
    const { drawing } = context(this.canvas, Math.max(size, Math.ceil(cells / columns) * size));
    const gap = size > 4 ? 1 : 0.5;
    for (let cell = 0; cell < cells; cell++) {
      drawing.fillStyle = this.colourOf(cell * per, per);
      drawing.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - gap, size - gap);
    }
    if (this.pages && per === 1 && size >= LETTERS) this.drawLetters(drawing, size, columns);
    if (this.cursor !== null) this.outline(drawing, Math.floor(this.cursor / per), size, columns);
    if (this.pages) return this.tell(index);
    this.canvas.setAttribute("aria-label", word("blocks_label", index, held, blocks, shared, cached));
    if (this.cursor === null) this.note.textContent = word("blocks_note", ...[held, shared, cached, blocks].map(number));
  }

  /** The sums of pages, as the records say. */
  tell(index) {
    const { held, shared, blocks, kinds } = this.facts;
    const [states, cached, snapshots] = ["state", "cached", "snapshot"].map((kind) => kinds[kind] ?? 0);
    this.canvas.setAttribute("aria-label", word("pages_label", index, held, blocks, cached, snapshots));
    if (this.cursor !== null) return;
    this.note.textContent = word("pages_note", ...[held, states, shared, cached, snapshots, blocks].map(number));
  }

  drawLetters(drawing, size, columns) {
    drawing.font = `${size - 4}px ${colour("mono")}`;
    drawing.textAlign = "center";
    drawing.textBaseline = "middle";
    for (const [page, held] of this.pages) {
      const isDark = ["blue", "teal", "gold", "purple", "orange"].includes(this.looksOf(held)[1]);
      drawing.fillStyle = colour(isDark ? "panel" : "ink");
      const [x, y] = [(page % columns) * size, Math.floor(page / columns) * size];
      drawing.fillText(letterOf(held, this.facts.windows), x + (size - 1) / 2, y + size / 2);
    }
  }

  looksOf(page) {
    return looksOf(page, this.facts.windows, this.schedule.isMine(page.holder));
  }

  outline(drawing, cell, size, columns) {
    drawing.strokeStyle = colour("ink");
    drawing.strokeRect((cell % columns) * size - 0.5, Math.floor(cell / columns) * size - 0.5, size, size);
  }

  /** Of several blocks in a cell, the state that says most is shown. */
  colourOf(first, per) {
    let best = [0, "free"];
    for (let block = first; block < first + per; block++) {
      const page = this.pages?.get(block);
      if (page && this.looksOf(page)[0] > best[0]) best = this.looksOf(page);
      const state = this.states.get(block);
      if (state === undefined) continue;
      const [holder, holders] = state;
      const found =
        holder === CACHED ? [1, "cached"]
        : holders > 1 ? [3, "purple"]
        : this.schedule.isMine(holder) ? [4, "orange"]
        : [2, holder % 2 ? "blue" : "blue-soft"];
      if (found[0] > best[0]) best = found;
    }
    return colour(best[1]);
  }

  point(event) {
    if (!this.grid) return;
    const { size, columns, per } = this.grid;
    const column = Math.floor(event.offsetX / size);
    const block = (Math.floor(event.offsetY / size) * columns + column) * per;
    this.show(column < columns && block < this.facts.blocks ? block : null);
  }

  key(event) {
    const { columns, per } = this.grid ?? { columns: 1, per: 1 };
    const moves = { ArrowLeft: -per, ArrowRight: per, ArrowUp: -columns * per, ArrowDown: columns * per };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const block = (this.cursor ?? -per) + (this.cursor === null ? per : moves[event.key]);
    if (block >= 0 && block < this.facts.blocks) this.show(block);
  }

  show(block) {
    this.cursor = block;
    this.onCursor?.();
    if (block === null) return;
    if (this.pages) {
      const page = this.pages.get(block);
      const label = page && (this.schedule.labelOf(page.holder) ?? word("unknown"));
      this.note.textContent = wordsOf(block, page, this.facts, label);
      return;
    }
    const [holder, holders] = this.states.get(block) ?? [0, 0];
    const label = this.schedule.labelOf(holder) ?? word("unknown");
    this.note.textContent =
      holder === 0 ? word("block_free", block)
      : holder === CACHED ? word("block_cached", block)
      : holders > 1 ? word("block_shared", block, label, holders - 1)
      : word("block_held", block, label);
  }
}
