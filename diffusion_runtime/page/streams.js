// Streams of causal models: frames while they are made, prompts changed on the way, forks.
import { discard, follow, isOver, pictureOf, post, problem, put, routeOf, sorted, source } from "./api.js";
import { button, clip, duration, el, link, row, say, swap } from "./dom.js";
import { draft, fields, save, valueOf } from "./draft.js";
import { field } from "./inputs.js";

export function streamsView() {
  const shown = el("div.results"), trouble = problem(), stopped = new AbortController(), open = new Map();
  const empty = el("div.empty", el("p", "Frames appear here while they are made. Meanwhile another prompt can take over from the next part on, and a fork goes on from there as a video of its own."));
  const prompt = el("textarea", { rows: 2, value: draft.prompt, name: "prompt", oninput: () => save({ prompt: prompt.value }) });
  // before: frames of the stream that this one continues.
  function add(job, before = []) {
    if (open.has(job.id)) return;
    const own = player(job, before, stopped.signal, add);
    open.set(job.id, own);
    empty.hidden = true;
    shown.prepend(own.node);
  }
  const begin = async () => {
    const job = await post("v1/videos", { ...fields(), ...(draft.seed === "" ? {} : { seed: Number(draft.seed) }), stream: true });
    put(job);
    add(job);
  };
  const form = el("form.form", { onsubmit: (event) => { event.preventDefault(); trouble.attempt(begin); } }, field("Prompt", prompt), el("p", `${valueOf("width")} x ${valueOf("height")}, ${valueOf("num_frames")} frames (`, el("a", { href: "#make" }, "change"), ")"),
  row(el("button.main", { type: "submit" }, "Begin a stream")), trouble.node);
  for (const job of sorted().filter((each) => each.is_stream).slice(0, 6).reverse()) add(job);
  return { title: "Streams", node: el("div.columns", form, el("div", empty, shown)), stop: () => stopped.abort() };
}

function player(job, before, signal, addFork) {
  const frames = [...before], prompts = [], canvas = el("canvas", { role: "img", "aria-label": job.prompt }), context = canvas.getContext("2d");
  const [width, height] = job.size.split("x").map(Number), state = el("p.state"), told = el("ol.prompts"), trouble = problem();
  Object.assign(canvas, { width, height });
  const next = el("input", { name: "next", "aria-label": "Prompt from the next part on", placeholder: "another prompt from here on" }), actions = el("div");
  let at = 0, fps = job.fps, now = job, last = 0;
  const { act } = trouble;
  const words = () => next.value.trim() || undefined;
  function playNext(time) {
    if (signal.aborted) return;
    // Frames are shown at their rate, and wait for those that are not there yet.
    if (at < frames.length && time - last >= 1000 / fps - 4) { last = time; context.drawImage(frames[at++], 0, 0, width, height); }
    requestAnimationFrame(playNext);
  }
  async function take({ first_frame: first, fps: rate, prompt, frames: parts, seconds }) {
    fps = rate;
    const pictures = await Promise.all(parts.map((part) => createImageBitmap(new Blob([Uint8Array.from(atob(part), (each) => each.charCodeAt(0))], { type: "image/jpeg" }))));
    frames.splice(first, pictures.length, ...pictures);
    if (prompts.at(-1) !== prompt) { prompts.push(prompt); told.append(el("li", `${(first / rate).toFixed(1)} s: ${prompt}`)); say(`Now: ${prompt}`); }
    state.textContent = `${frames.length} of ${job.num_frames} frames, ${(parts.length / seconds).toFixed(1)} per second`;
  }
  function end(found) {
    now = found;
    put(found);
    if (found.status === "failed") { state.textContent = found.error?.message ?? "it failed"; swap(actions, act("Remove", () => discard(found).then(() => node.remove()))); return; }
    swap(actions, row(button("Play again", () => { at = 0; }), link("Report", `#report/${found.id}`)));
    state.textContent = `${found.num_frames} frames in ${duration(found.inference_time_s)}`;
    if (!frames.length) source(pictureOf(found)).then((url) => canvas.replaceWith(clip(false, url, found.prompt)), () => {});
  }
  swap(actions, el("form.row", { onsubmit: (event) => {
    event.preventDefault();
    if (words()) trouble.attempt(async () => { await post(`${routeOf(now)}/prompt`, { prompt: words() }); next.value = ""; });
  } }, next, el("button", { type: "submit" }, "Change the prompt"),
  act("Fork", async () => { const twin = await post(`${routeOf(now)}/fork`, { prompt: words(), seed: Math.floor(Math.random() * 2 ** 31) }); next.value = ""; put(twin); addFork(twin, frames.slice()); }),
  act("Stop", async () => end(await post(`${routeOf(now)}/cancel`)))));
  const node = el("article.card", { "aria-label": job.prompt.slice(0, 80) }, el("h2", job.forked_from_video_id ? `Fork: ${job.prompt}` : job.prompt), canvas, state, told, actions, trouble.node);
  let chain = Promise.resolve();
  if (isOver(job)) end(job);
  else {
    state.textContent = "waiting";
    trouble.attempt(() => follow(`${routeOf(job)}/events`, (name, data) => {
      // In their order, though pictures are decoded beside.
      chain = chain.then(() => name === "frames" ? take(data) : isOver(data) ? end(data) : null).catch((error) => trouble.show(error));
    }, signal));
  }
  requestAnimationFrame(playNext);
  return { node };
}
