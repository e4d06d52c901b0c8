// The page's words in two languages; [name]: [English, Chinese].
const WORDS = {
  skip: ["Skip to the content", "跳到正文"],
  connecting: ["connecting", "正在连接"],
  live: ["live", "实时"],
  away: ["the scheduler is away: {0}", "调度器不在线：{0}"],
  denied: ["the gateway may not watch steps: give it an admin's token (--http-token-file)", "网关无权观察步骤：请给它管理员令牌（--http-token-file）"],
  no_token: ["the token printed at start is needed to see the engine", "需要启动时打印的令牌才能查看引擎"],
  gone: ["the gateway does not answer; trying again", "网关没有应答，正在重试"],
  dropped: ["{0} step records were lost", "丢失了 {0} 条步骤记录"],
  token: ["page token", "页面令牌"],
  key: ["API key", "API 密钥"],
  use: ["use", "使用"],
  now: ["Now", "当前"],
  lanes: ["Executors: the schedule as it runs, and the KV blocks", "执行器：正在运行的调度和 KV 块"],
  charts: ["The last three minutes", "最近三分钟"],
  chat: ["Playground", "试用"],
  prompt: ["Message", "消息"],
  max_tokens: ["max tokens", "最多 token 数"],
  temperature: ["temperature; empty: the model's, else 0.7", "温度；留空：用模型自带的，否则 0.7"],
  send: ["Send", "发送"],
  four: ["Four at once", "同时四个"],
  new_chat: ["New chat", "新对话"],
  stop: ["Stop", "停止"],
  waiting: ["waiting", "等待"],
  running: ["running", "运行"],
  swapped: ["swapped out", "已换出"],
  output_rate: ["output tokens/s", "输出 token/秒"],
  ttft: ["time to first token", "首 token 时间"],
  hits: ["prefix cache hits", "前缀缓存命中"],
  preemptions: ["preemptions", "抢占"],
  host: ["host blocks", "主机块"],
  executor: ["executor {0}", "执行器 {0}"],
  serving: ["serving", "服务中"],
  lost: ["lost", "失联"],
  stalled: ["stalled", "停滞"],
  draining: ["draining", "排空中"],
  refused: ["refused", "被拒绝"],
  kill: ["Kill {0}", "终止{0}"],
  killed: ["killed; it is started again", "已终止，正在重新启动"],
  facts: ["{0} of {1} slots · {2} of {3} blocks · {4} cached · {5} tokens", "{0}/{1} 槽 · {2}/{3} 块 · {4} 已缓存 · {5} token"],
  facts_pages: ["{0} of {1} slots · {2} of {3} pages · {4} cached · {5} tokens", "{0}/{1} 槽 · {2}/{3} 页 · {4} 已缓存 · {5} token"],
  hidden: ["{0} more sequences are not drawn", "另有 {0} 个序列未画出"],
  step: ["step", "步"],
  batch: ["in the batch", "批内"],
  prefill: ["prefill", "预填充"],
  decode: ["decode", "解码"],
  several: ["several tokens", "多个 token"],
  unused: ["computed past its end", "结束后仍计算"],
  idle: ["not computed", "未计算"],
  held: ["block held", "占用的块"],
  shared: ["shared", "共享"],
  cached: ["cached", "已缓存"],
  free: ["free", "空闲"],
  yours: ["yours", "你的"],
  in_window: ["W: held in a window", "W：窗口内占用"],
  window_cached: ["w: of a window, cached", "w：窗口的，已缓存"],
  state: ["S: recurrent state", "S：递归状态"],
  snapshot: ["s: snapshot", "s：快照"],
  schedule_label: ["Schedule of executor {0}: {1} sequences in the newest step", "执行器 {0} 的调度：最新一步有 {1} 个序列"],
  blocks_label: ["KV blocks of executor {0}: {1} of {2} held, {3} shared, {4} cached. Arrow keys tell of single blocks.", "执行器 {0} 的 KV 块：{2} 块中占用 {1}，共享 {3}，已缓存 {4}。方向键查看单个块。"],
  block_held: ["block {0}: held by {1}", "块 {0}：由 {1} 占用"],
  block_shared: ["block {0}: held by {1} and {2} more", "块 {0}：由 {1} 和另外 {2} 个占用"],
  block_cached: ["block {0}: cached, held by nobody", "块 {0}：已缓存，无人占用"],
  block_free: ["block {0}: free", "块 {0}：空闲"],
  blocks_note: ["{0} held · {1} shared · {2} cached · {3} in the pool", "占用 {0} · 共享 {1} · 已缓存 {2} · 池中 {3}"],
  pages_label: ["Pages of executor {0}: {1} of {2} held, {3} cached, {4} of snapshots. Arrow keys tell of single pages.", "执行器 {0} 的页：{2} 页中占用 {1}，已缓存 {3}，快照 {4}。方向键查看单个页。"],
  pages_note: ["{0} held, of them {1} of states · {2} shared · {3} cached · {4} of snapshots · {5} in the pool", "占用 {0}（其中状态 {1}）· 共享 {2} · 已缓存 {3} · 快照 {4} · 池中 {5}"],
  page_free: ["page {0}: free", "页 {0}：空闲"],
  page_kv: ["page {0}: KV of tokens {1} to {2}, {3}", "页 {0}：token {1} 到 {2} 的 KV，{3}"],
  page_state: ["page {0}: part {1} of the recurrent state of {2}", "页 {0}：{2} 的递归状态的第 {1} 部分"],
  page_copy: ["page {0}: for a snapshot behind token {1}, not made yet", "页 {0}：留给 token {1} 之后的快照，尚未写入"],
  page_snapshot: ["page {0}: snapshot of a state behind token {1}: a prefix of {1} tokens is a hit", "页 {0}：token {1} 之后的状态快照：{1} 个 token 的前缀可命中"],
  in_group: ["layers without a window", "无窗口的层"],
  in_window_of: ["layers with a window of {0}", "窗口为 {0} 的层"],
  and_held: ["{0}; held by {1}", "{0}；由 {1} 占用"],
  and_shared: ["{0}; held by {1} and {2} more", "{0}；由 {1} 和另外 {2} 个占用"],
  and_cached: ["{0}; cached, held by nobody", "{0}；已缓存，无人占用"],
  unknown: ["a request from before this page was opened", "打开页面之前的请求"],
  memory: ["of its GPU: {0}", "GPU 显存：{0}"],
  memory_part: ["{0} {1} ({2} computed)", "{0} {1}（事先算得 {2}）"],
  weights: ["weights", "权重"],
  "drafts and adapters": ["drafts and adapters", "草稿与适配器"],
  "KV blocks": ["KV blocks", "KV 块"],
  "steps and graphs": ["steps and graphs", "步骤与图"],
  tokens_chart: ["Tokens per second", "每秒 token"],
  output: ["output", "输出"],
  prompts: ["prompt", "提示"],
  ttft_chart: ["Time to first token, ms", "首 token 时间（毫秒）"],
  step_chart: ["Time of a step, ms", "每步时间（毫秒）"],
  queue_chart: ["Requests", "请求"],
  median: ["median", "中位数"],
  most: ["most", "最大"],
  p99: ["p99", "p99"],
  you: ["You", "你"],
  waited: ["waited", "等待"],
  first_token: ["first token", "首 token"],
  total: ["total", "总计"],
  of_total: ["{0}, {1} tokens", "{0}，{1} 个 token"],
  prefix: ["prefix hit", "前缀命中"],
  of_tokens: ["{0} of {1} prompt tokens", "{1} 个提示 token 中的 {0} 个"],
  steps: ["steps", "步数"],
  of_steps: ["{0} prefill, {1} decode", "预填充 {0}，解码 {1}"],
  preempted: ["preempted", "被抢占"],
  times: ["{0} times", "{0} 次"],
  finish: ["ended by", "结束原因"],
  e_joined: ["joined executor {0} at step {1}", "第 {1} 步加入执行器 {0}"],
  e_first: ["first token at step {1}", "第 {1} 步首个 token"],
  e_preempted: ["preempted at step {1}", "第 {1} 步被抢占"],
  e_swapped_out: ["swapped out at step {1}", "第 {1} 步换出"],
  e_swapped_in: ["swapped in at step {1}", "第 {1} 步换入"],
  e_moved: ["moved to executor {0} at step {1}", "第 {1} 步移到执行器 {0}"],
  e_lost: ["executor {0} was lost", "执行器 {0} 失联"],
  e_left: ["ended at step {1}", "第 {1} 步结束"],
};

const STORED = "cadenza-language";
let language = localStorage.getItem(STORED) ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");

/** The word of a name, with {0}, {1} and so on replaced. */
export function word(name, ...values) {
  const text = WORDS[name]?.[language === "zh" ? 1 : 0] ?? name;
  return text.replace(/\{(\d)\}/g, (_, place) => values[place] ?? "");
}

/** The name of one of the page's own requests, by its number. */
export function yours(count) {
  return `${word("you")} ${count}`;
}

/** Write the words of all elements with data-w, and the language of the document. */
export function translate() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const element of document.querySelectorAll("[data-w]")) element.textContent = word(element.dataset.w);
  const other = document.getElementById("language");
  other.textContent = language === "zh" ? "English" : "中文";
  other.lang = language === "zh" ? "en" : "zh";
}

/** Change to the other language. */
export function switchLanguage() {
  language = language === "zh" ? "en" : "zh";
  localStorage.setItem(STORED, language);
  translate();
}

/** A number as people read it: 12,345, 12.3, 0.42. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString(language === "zh" ? "zh-CN" : "en-US", { maximumFractionDigits: digits });
}

/** Bytes in binary units, from KiB on, as `cadenza top` has them. */
export function size(bytes) {
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = Math.abs(bytes) / 1024;
  while (value >= 1024 && units.length > 1) {
    value /= 1024;
    units.shift();
  }
  return `${bytes < 0 ? "-" : ""}${value.toFixed(1)} ${units[0]}`;
}

/** What an executor takes of a GPU's memory, part by part: as measured, and as computed before. */
export function memoryWords(parts) {
  const told = parts.map(([name, computed, measured]) => word("memory_part", word(name), size(measured), size(computed)));
  return word("memory", told.join(" · "));
}
