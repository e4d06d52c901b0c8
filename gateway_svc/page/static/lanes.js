// A panel for each executor: its state, the schedule, the blocks, and the button that kills it.
import { call } from "./api.js";
import { Blocks } from "./blocks.js";
import { onTheme } from "./colours.js";
import { Schedule } from "./schedule.js";
import { memoryWords, number, word } from "./words.js";

const OPEN_AT_FIRST = 2;

function make(tag, className, parent) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  parent?.append(element);
  return element;
}

class Lane {
  constructor(index, place, { names, canKill }) {
    this.index = index;
    this.canKill = canKill;
    this.isDirty = true;
    this.panel = make("details", "lane");
    this.panel.open = place < OPEN_AT_FIRST;
    const summary = make("summary", "", this.panel);
    this.title = make("h3", "", summary);
    this.state = make("span", "state", summary);
    this.facts = make("span", "facts", summary);
    this.button = make("button", "danger act", this.panel);
    this.button.type = "button";
    this.button.addEventListener("click", () => this.kill());
    this.schedule = new Schedule(this.canvas(), names);
    this.hidden = make("p", "under", this.panel);
    const blocks = this.canvas();
    blocks.tabIndex = 0;
    this.blocks = new Blocks(blocks, make("p", "under", this.panel), this.schedule);
    this.blocks.onCursor = () => this.touch();
    this.memory = make("p", "under memory", this.panel);
    this.panel.addEventListener("toggle", () => this.touch());
    new ResizeObserver(() => this.touch()).observe(this.panel);
  }

  canvas() {
    const canvas = make("canvas", "", this.panel);
    canvas.setAttribute("role", "img");
    return canvas;
  }

  clear() {
    this.schedule.clear();
    this.blocks.clear();
  }

  add({ blocks, pages, held, shared, kinds, schedule }) {
    if (schedule) this.schedule.add(schedule);
    if (pages) this.blocks.addPages(pages);
    else this.blocks.add(blocks);
    this.blocks.count({ held, shared, kinds });
    this.touch();
  }

  look(info) {
    this.info = info;
    this.blocks.count({ blocks: info.blocks, cached: info.cached_blocks, windows: info.windows ?? [], size: info.block_size });
    this.touch();
  }

  async kill() {
    this.button.disabled = true;
    try {
      await call("page/kill", { executor: this.info.target });
      this.facts.textContent = word("killed");
    } catch (error) {
      this.facts.textContent = error.message;
    }
    setTimeout(() => { this.button.disabled = false; }, 2000);
  }

  touch() {
    if (this.isDirty) return;
    this.isDirty = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.isDirty = false;
    const name = word("executor", this.index);
    this.title.textContent = name;
    this.button.hidden = !this.canKill();
    this.button.textContent = word("kill", name);
    if (this.info) {
      const { state, reason, running, slots, used_blocks, blocks, cached_blocks, output_tokens, device } = this.info;
      this.state.textContent = reason ? `${word(state)}: ${reason}` : word(state);
      this.state.classList.toggle("bad", state !== "serving");
      const facts = word(this.info.windows ? "facts_pages" : "facts", ...[running, slots, used_blocks, blocks, cached_blocks, output_tokens].map(number));
      if (!this.button.disabled) this.facts.textContent = `${device} · ${facts}`;
    }
    this.memory.hidden = !this.info?.memory; // on a CPU
    this.memory.textContent = this.info?.memory ? memoryWords(this.info.memory) : "";
    const hidden = this.schedule.hidden;
    this.hidden.hidden = !hidden;
    this.hidden.textContent = hidden ? word("hidden", number(hidden)) : "";
    if (!this.panel.open) return;
    this.schedule.draw(this.index);
    this.blocks.draw(this.index);
  }
}

export class Lanes {
  constructor(place, options) {
    this.place = place;
    this.options = options;
    this.lanes = new Map();
    onTheme(() => this.touchAll());
  }

  of(index) {
    let lane = this.lanes.get(index);
    if (!lane) {
      lane = new Lane(index, this.lanes.size, this.options);
      this.lanes.set(index, lane);
      const after = [...this.lanes.values()].find((each) => each.index > index);
      this.place.insertBefore(lane.panel, after?.panel ?? null);
      lane.isDirty = false;
      lane.touch();
    }
    return lane;
  }

  frame(lanes) {
    for (const [index, fields] of Object.entries(lanes)) this.of(Number(index)).add(fields);
  }

  snapshot(lanes) {
    for (const lane of this.lanes.values()) lane.clear();
    this.frame(lanes);
    this.touchAll();
  }

  look(executors) {
    const known = new Set(executors.map((each) => each.index));
    for (const [index, lane] of this.lanes) {
      if (known.has(index)) continue;
      lane.panel.remove();
      this.lanes.delete(index);
    }
    for (const info of executors) this.of(info.index).look(info);
  }

  touchAll() {
    for (const lane of this.lanes.values()) lane.touch();
  }
}

/** The meaning of colours, which are the same in all panels; of pages where an executor has windows or states. */
export function legend(place, executors) {
  const [windows, states] = [executors.some((each) => each.windows?.some(Boolean)), executors.some((each) => each.state_pages)];
  const entries = [
    ["blue", "prefill"], ["green", "decode"], ["dot", "waiting"], ["dash", "idle"], ["red", "unused"],
    ["soft", "held"], ["purple", "shared"], ["cached", "cached"], ["free", "free"], ["orange", "yours"],
    ...(windows ? [["teal", "in_window"], ["teal-cached", "window_cached"]] : []),
    ...(states ? [["gold", "state"], ["gold-soft", "snapshot"]] : []),
  ];
  place.replaceChildren(...entries.map(([colour, name]) => {
    const entry = make("span");
    make("i", `c-${colour}`, entry);
    entry.append(word(name));
    return entry;
  }));
}
