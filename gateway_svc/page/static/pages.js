// What a page of a pool holds, where KV groups and recurrent states share it: its letter, its colour and its words.
import { word } from "./words.js";

const [STATE, COPY, SNAPSHOT] = [-1, -2, -3]; // gateway_svc/page/pages.py
export const CACHED = -1;

/** The letter of docs/kv-cache.md: F, W, S by what a page holds, small where nobody holds it; a dot: free. */
export function letterOf(page, windows) {
  if (page === undefined) return ".";
  const letter = page.kind < 0 ? "S" : windows[page.kind] ? "W" : "F";
  return page.holder === CACHED && page.kind !== COPY ? letter.toLowerCase() : letter;
}

/** How much a page says beside others in its cell, and its colour. */
export function looksOf(page, windows, isMine) {
  if (page.kind === SNAPSHOT) return [4, "gold-soft"];
  if (page.kind < 0) return [5, isMine ? "orange" : "gold"];
  if (page.holder === CACHED) return [1, windows[page.kind] ? "teal-cached" : "cached"];
  if (isMine) return [6, "orange"];
  if (page.holders > 1) return [3, "purple"];
  return [2, windows[page.kind] ? "teal" : page.holder % 2 ? "blue" : "blue-soft"];
}

/** What a reader is told of a page; `label`: of the request that holds it. */
export function wordsOf(number, page, { windows, size }, label) {
  if (page === undefined) return word("page_free", number);
  const { kind, position, holder, holders } = page;
  if (kind === STATE) return word("page_state", number, position + 1, label);
  if (kind === COPY) return word("page_copy", number, position);
  if (kind === SNAPSHOT) return word("page_snapshot", number, position);
  const group = windows[kind] ? word("in_window_of", windows[kind]) : word("in_group");
  const text = word("page_kv", number, position, position + size - 1, group);
  if (holder === CACHED) return word("and_cached", text);
  return holders > 1 ? word("and_shared", text, label, holders - 1) : word("and_held", text, label);
}
