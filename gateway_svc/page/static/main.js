// The page: its parts, and the events that they get.
import { call, follow, rights } from "./api.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Lanes, legend } from "./lanes.js";
import { number, switchLanguage, translate, word } from "./words.js";

const NUM_NAMES = 200; // of the page's own requests that are remembered
const by = (id) => document.getElementById(id);
const names = new Map(); // request id: number of the page's own request
const link = { name: "connecting", values: [] };
let about = { has_right: false, can_kill: false };
let state = null;
let dropped = 0;

translate();
const lanes = new Lanes(by("lanes"), { names, canKill: () => about.can_kill && about.has_right });
const charts = new Charts(by("charts"));
const form = by("chat");
const chat = new Chat({ form, answers: by("answers"), four: by("four"), fresh: by("new"), names });

function say(name, ...values) {
  Object.assign(link, { name, values });
  const place = by("link");
  const lost = dropped ? ` · ${word("dropped", number(dropped))}` : "";
  const text = word(name, ...values) + (name === "live" ? lost : "");
  if (place.textContent !== text) place.textContent = text;
  place.classList.toggle("away", !["live", "connecting"].includes(name));
  place.dataset.state = name;
}

function show() {
  legend(by("legend"), state?.executors ?? []);
  say(link.name, ...link.values);
  if (!state) return;
  by("version").textContent = state.version;
  const share = state.prefix_queries ? `${number((100 * state.prefix_hits) / state.prefix_queries)} %` : "–";
  const ttft = charts.newest("ttft_p50_ms");
  const shown = [
    ["waiting", number(state.waiting)],
    ["running", number(state.running)],
    ["swapped", number(state.swapped)],
    ["output_rate", number(charts.newest("output_tokens_per_s"))],
    ["ttft", ttft === null ? "–" : `${number(ttft)} ms`],
    ["hits", share],
    ["preemptions", number(state.preemptions)],
    ["host", `${number(state.used_host_blocks)} / ${number(state.host_blocks)}`],
  ];
  by("numbers").replaceChildren(...shown.map(([name, value]) => {
    const entry = document.createElement("div");
    const [term, description] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = word(name);
    description.textContent = value;
    description.dataset.number = name;
    entry.append(term, description);
    return entry;
  }));
}

function look(event) {
  state = event;
  if (event.point) charts.add(event.point);
  lanes.look(event.executors);
  show();
}

function on(event) {
  if (event.dropped !== undefined) dropped = event.dropped;
  switch (event.type) {
    case "snapshot":
      lanes.snapshot(event.lanes);
      charts.snapshot(event.figures);
      if (event.state) look(event.state);
      break;
    case "frame": lanes.frame(event.lanes); break;
    case "state": look(event); say("live"); break;
    case "away": say("away", event.message); break;
    case "denied": say("denied"); break;
  }
  while (names.size > NUM_NAMES) names.delete(names.keys().next().value);
}

async function begin() {
  try {
    about = await call("page/about");
  } catch { /* the events say what is wrong */ }
  lanes.touchAll();
  follow(on, (error) => say(error.status === 401 ? "no_token" : error.status ? "away" : "gone", error.message));
}

by("token").value = rights.token;
by("key").value = rights.key;
by("rights").addEventListener("submit", (event) => {
  event.preventDefault();
  rights.token = by("token").value.trim();
  rights.key = by("key").value.trim();
  begin();
});
by("language").addEventListener("click", () => {
  switchLanguage();
  show();
  charts.build();
  chat.translate();
  lanes.touchAll();
});
show();
begin();
