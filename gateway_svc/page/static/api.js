// Requests to the gateway: the token and the key, event streams, and trying again.
const TOKEN = "cadenza-page-token";
const KEY = "cadenza-api-key";
const AGAIN_MS = 1000;

const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem(TOKEN, given);
  history.replaceState(null, "", location.pathname); // not in the history, nor over a shoulder
}

export const rights = {
  get token() { return sessionStorage.getItem(TOKEN) ?? ""; },
  set token(value) { sessionStorage.setItem(TOKEN, value); },
  get key() { return sessionStorage.getItem(KEY) ?? ""; },
  set key(value) { sessionStorage.setItem(KEY, value); },
};

function headers(more) {
  const all = { ...more };
  if (rights.token) all["X-Cadenza-Page-Token"] = rights.token;
  if (rights.key) all.Authorization = `Bearer ${rights.key}`;
  return all;
}

async function refused(response) {
  let message = `${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: the status alone */ }
  return Object.assign(new Error(message), { status: response.status });
}

/** A JSON answer; throws an Error with `status`. */
export async function call(path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { ...options, headers: headers({ "Content-Type": "application/json" }) });
  if (!response.ok) throw await refused(response);
  return response.json();
}

/** Call `on` with each event of a stream until it ends; throws an Error with `status` if it is refused. */
export async function stream(path, on, { body, signal } = {}) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { ...options, signal, headers: headers({ "Content-Type": "application/json" }) });
  if (!response.ok) throw await refused(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) on(JSON.parse(part.slice(6)));
  }
}

let following = null;

/** Follow the page's events for ever: `on` gets each event, `onError` why there are none. A second call begins anew. */
export async function follow(on, onError) {
  following?.abort();
  const mine = (following = new AbortController());
  while (!mine.signal.aborted) {
    try {
      await stream("page/events", on, { signal: mine.signal });
    } catch (error) {
      if (mine.signal.aborted) return;
      onError(error);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}
