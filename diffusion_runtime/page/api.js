// The server's API: requests with the key that the user gave, server-sent events, media that need the key, the job list.
import { button, el, list, row, swap } from "./dom.js";

const KEY = "diffusion-runtime key";
let asking = null;

export class ServerError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    Object.assign(this, { status, code: error?.code, param: error?.param, reasons: error?.reasons ?? [] });
  }
}

const keyOf = () => sessionStorage.getItem(KEY);

async function send(path, options = {}) {
  for (;;) {
    const key = keyOf(), headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      document.body.dataset.gone = "";
      throw new ServerError(0, { message: "The server does not answer. Is it running? Try again when it is." });
    }
    delete document.body.dataset.gone;
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    if (response.status !== 401) throw new ServerError(response.status, body?.error);
    // Several requests ask for it once.
    if (key === keyOf()) await (asking ??= askKey(key).finally(() => { asking = null; }));
  }
}

function askKey(wrong) {
  return new Promise((done) => {
    const input = el("input", { type: "password", id: "key", required: true, autocomplete: "off" });
    const form = el("form", { method: "dialog", onsubmit: () => sessionStorage.setItem(KEY, input.value.trim()) },
      el("label", { htmlFor: "key" }, wrong ? "That key is not one of this server's. Its key:" : "This server asks for a key:"), input,
      row(el("button.main", "Use it")), el("small", "It stays in this tab."));
    const dialog = el("dialog", { "aria-label": "Key of the server", oncancel: (event) => event.preventDefault(), onclose: () => { dialog.remove(); done(); } }, form);
    document.body.append(dialog);
    dialog.showModal();
  });
}

export const get = async (path) => (await send(path)).json();
export const remove = async (path) => (await send(path, { method: "DELETE" })).json();
export const bytes = async (path) => (await send(path)).arrayBuffer();
export const blob = async (path) => (await send(path)).blob();

// body: plain values, or a form.
export async function post(path, body = {}, signal = undefined) {
  const isForm = body instanceof FormData;
  const options = { method: "POST", signal, body: isForm ? body : JSON.stringify(body), headers: isForm ? {} : { "content-type": "application/json" } };
  return (await send(path, options)).json();
}

// Calls on(name, data) for every event until the stream ends.
export async function follow(path, on, signal) {
  const reader = (await send(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let left = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    left += value;
    for (let end; (end = left.indexOf("\n\n")) >= 0; left = left.slice(end + 2)) {
      const lines = left.slice(0, end).split("\n"), name = lines.find((line) => line.startsWith("event: "));
      const data = lines.find((line) => line.startsWith("data: "));
      if (name && data) on(name.slice(7), JSON.parse(data.slice(6)));
    }
  }
}

// What an image or a video has as its address, read whole: their elements send no key, and a player that is not at its
// end holds one of the six connections that a browser has to a server.
const kept = new Map();
export function source(path) {
  if (!kept.has(path)) {
    kept.set(path, blob(path).then((found) => URL.createObjectURL(found)));
    kept.get(path).catch(() => kept.delete(path));
    if (kept.size > 60) {
      const [oldest, url] = kept.entries().next().value;
      kept.delete(oldest);
      url.then((each) => URL.revokeObjectURL(each), () => {});
    }
  }
  return kept.get(path);
}

export const routeOf = (job) => `v1/${job.object}s/${job.id}`;
export const isOver = (job) => job.status === "completed" || job.status === "failed";
export const pictureOf = (job, at = 0) => `${routeOf(job)}/content?variant=${job.object === "image" ? at : "video"}`;

// The jobs of this server that this key may see, the newest first, and what they show while they run.
export const jobs = new Map();
export const previews = new Map();
const watchers = new Set(), followed = new Map();
let ticking = null;

export function watch(onchange) {
  watchers.add(onchange);
  return () => watchers.delete(onchange);
}

export const sorted = () => [...jobs.values()].sort((one, other) => other.created_at - one.created_at || (other.order ?? 0) - (one.order ?? 0));

let order = 0, oldest = 0;
export function put(job) {
  jobs.set(job.id, { ...job, order: jobs.get(job.id)?.order ?? order++ });
  if (isOver(job)) previews.delete(job.id);
  for (const onchange of watchers) onchange(jobs.get(job.id));
  if (!isOver(job)) ticking ??= setTimeout(tick, 300);
}

export async function refresh() {
  const pages = await Promise.all(["videos", "images"].map((kind) => get(`v1/${kind}?limit=30`)));
  for (const page of pages) for (const job of page.data.reverse()) put(job);
}

// All jobs of the storage, a hundred at a time.
let whole = null;
export function everything() {
  return whole ??= Promise.all(["videos", "images"].map(async (kind) => {
    for (let after = ""; after != null;) {
      const page = await get(`v1/${kind}?limit=100${after && `&after=${after}`}`);
      for (const job of page.data) if (!jobs.has(job.id)) jobs.set(job.id, { ...job, order: --oldest });
      after = page.has_more ? page.last_id : null;
    }
  })).catch((error) => { whole = null; throw error; });
}

export async function discard(job) {
  await remove(routeOf(job));
  jobs.delete(job.id);
  for (const onchange of watchers) onchange(null);
}

// Waiting jobs are asked for; of those that run, at most two are followed: a browser has six connections to one server.
async function tick() {
  const open = [...jobs.values()].filter((job) => !isOver(job) && !followed.has(job.id));
  for (const job of open.filter((each) => each.status === "in_progress" && !each.is_stream).slice(0, 2 - followed.size)) followJob(job);
  for (const job of open.filter((each) => !followed.has(each.id)).slice(-8)) {
    try {
      put(await get(routeOf(job)));
    } catch (error) {
      if (error.status === 404) { jobs.delete(job.id); for (const onchange of watchers) onchange(null); }
    }
  }
  ticking = [...jobs.values()].some((job) => !isOver(job)) ? setTimeout(tick, 700) : null;
}

async function followJob(job) {
  followed.set(job.id, true);
  try {
    await follow(`${routeOf(job)}/events`, (name, data) => {
      if (name === "preview") previews.set(job.id, `data:image/${data.output_format};base64,${data.b64_json}`);
      if (name === "preview") for (const onchange of watchers) onchange(jobs.get(job.id));
      else if (data.id === job.id) put(data);
    });
  } catch {
    // The next look finds out what became of it.
  }
  followed.delete(job.id);
}

// A place for what went wrong, with the reasons of backends. attempt: runs, and shows what it throws; act: a button of that.
export function problem() {
  const node = el("div.problem", { role: "alert", hidden: true });
  const show = (error) => {
    swap(node, el("p", error.message), list((error.reasons ?? []).map(([name, why]) => `${name}: ${why}`)));
    node.hidden = false;
  };
  const attempt = async (run) => { node.hidden = true; try { return await run(); } catch (error) { if (error.name !== "AbortError") show(error); } };
  return { node, show, attempt, act: (text, run, attributes) => button(text, () => attempt(run), attributes) };
}
