// Make: the form of a request after the model's card, and what came of it.
import { ServerError, blob, discard, everything, isOver, jobs, pictureOf, post, previews, problem, put, routeOf, sorted, source, watch } from "./api.js";
import { button, clip, duration, el, facts, link, offer, row, say, size, swap, word } from "./dom.js";
import { EMPTY, draft, fields, fromJob, fromRecipe, isImage, model, recipeIn, save, set, valueOf } from "./draft.js";
import { choice, field, files, plain, stepper, takeDrops } from "./inputs.js";

// Fields that have a place of their own, or are the page's.
const OWN = /^(prompt|model|size|seed|preset|attention|n|width|height|num_frames|fps|seconds|num_inference_steps|guidance_scale|negative_prompt|image|mask|stream|wait|(input|return|output|response|partial)_.*)$/;
// Images are kept here, and not with the draft: a browser keeps no files from one load to the next.
const given = { images: [], masks: [] }, added = new Set();
// The first pattern that matches the model's id decides. The embedded models know few words.
const EXAMPLES = [[/^shapes/, "a red circle moving left"], [/^/, "a sailboat moving right on the sea at sunset"]];

export function makeView() {
  const form = el("div.form"), results = el("div.results");
  const cards = new Map(), trouble = problem();
  let most = 30, isWhole = false;
  const draw = () => swap(form, formOf(draw));
  const drawResults = () => {
    for (const [id, card] of cards) if (!jobs.has(id)) { card.node.remove(); cards.delete(id); }
    for (const [at, job] of sorted().slice(0, most).entries()) {
      if (!cards.has(job.id)) cards.set(job.id, resultCard(job, draw));
      const card = cards.get(job.id);
      card.update(job);
      if (results.children[at] !== card.node) results.insertBefore(card.node, results.children[at] ?? null);
    }
    empty.hidden = cards.size > 0;
    older.hidden = jobs.size <= most && (isWhole || jobs.size < 30);
  };
  // Few steps for a first look, where the model has a preset of them.
  const quick = "fast" in model.card.presets ? "fast" : "";
  const prompt = EXAMPLES.find(([id]) => id.test(model.card.id))[1];
  const example = async () => { save({ ...EMPTY, prompt, preset: quick }); draw(); put(await submitted(Math.floor(Math.random() * 2 ** 31))); };
  const empty = el("div.empty", el("p", "Results appear here. Write a prompt and press Make; to repeat or change an earlier result, drop its file on the form."),
    model.card.needs_image ? null : trouble.act(`Try it: “${prompt}”${quick && ", few steps"}`, example));
  const older = trouble.act("Older results", async () => { await everything(); isWhole = true; most += 30; drawResults(); });
  draw();
  drawResults();
  return { title: "Make", node: el("div.columns", form, el("section", { "aria-label": "Results" }, empty, trouble.node, results, older)), stop: watch(drawResults) };
}

const notice = el("p", { role: "status" });

async function takeSettings(chosen, draw) {
  const recipe = await recipeIn(chosen[0]);
  if (!recipe) throw new Error(`${chosen[0].name} has no recipe of this program. Files that it wrote have one: mp4, PNG, WebP, GIF, and the JSON beside them.`);
  const { settings, left } = fromRecipe(recipe);
  save(settings);
  draw();
  notice.textContent = `The settings of ${chosen[0].name} are in the form${left.length ? `, but for what this model cannot take: ${left.join(", ").slice(0, 200)}` : ""}.`;
}

function formOf(draw) {
  const { card } = model, trouble = problem(), take = (chosen) => trouble.attempt(() => takeSettings(chosen, draw));
  const many = card.size_multiple ?? 8, limits = { low: many, step: many };
  const prompt = el("textarea", { rows: 3, value: draft.prompt, name: "prompt", required: true, maxlength: 32000, oninput: () => save({ prompt: prompt.value }) });
  const frames = /^1\+(\d+)k$/.exec(card.frames_rule ?? "");
  const shown = (name, label, limit, hint) => stepper(label, valueOf(name), { ...limit, name }, (value) => { set(name, value); draw(); }, hint);
  const length = frames && shown("num_frames", "Frames", { low: 1, step: Number(frames[1]), high: card.max_frames },
    isImage() ? "an image" : `${(valueOf("num_frames") / (valueOf("fps") || 1)).toFixed(1)} s at ${valueOf("fps")} per second`);
  const seed = el("input", { value: draft.seed, name: "seed", inputmode: "numeric", pattern: "-?[0-9]*", placeholder: "random", oninput: () => save({ seed: seed.value.trim() }) });
  const presets = Object.keys(card.presets);
  const send = el("button.main", { type: "submit" }, isImage() ? "Make the image" : "Make the video");
  const form = el("form", { novalidate: true, onsubmit: (event) => { event.preventDefault(); submit(); } },
    field("Prompt", prompt),
    row(send, button("Clear", () => { notice.textContent = ""; save(EMPTY); draw(); })),
    trouble.node,
    presets.length ? field("Preset", choice([["", "the model's defaults"], ...presets.filter((name) => name !== "default" || Object.keys(card.presets[name]).length)], draft.preset,
      (value) => { save({ preset: value, values: {} }); draw(); })) : null,
    el("div.pair", shown("width", "Width", limits), shown("height", "Height", limits)),
    el("div.pair", length || null, valueOf("num_inference_steps") == null ? null : shown("num_inference_steps", "Steps", { low: 1 })),
    valueOf("guidance_scale") == null ? null : shown("guidance_scale", "Guidance", { low: 0, step: 0.1 }, valueOf("guidance_scale") > 1 ? "two passes per step" : "one pass per step"),
    "negative_prompt" in card.defaults ? field("Negative prompt", el("textarea", { rows: 1, value: valueOf("negative_prompt") ?? "", onchange: (event) => set("negative_prompt", event.target.value) })) : null,
    card.takes_image ? imageInputs(card, draw) : null,
    el("div.pair", field("Seed", seed), stepper("How many", draft.count, { low: 1, high: 8 }, (count) => save({ count }), "each with the next seed")),
    el("p", "Attention: ", el("b", attentionText(draft.attention)), " ", el("a", { href: "#attention" }, "choose")),
    more(draw),
    files("Settings of a file", ".mp4,.png,.webp,.gif,.json", false, take), notice);
  takeDrops(form, take);

  async function submit() {
    for (const each of form.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
    send.disabled = true;
    await trouble.attempt(async () => {
      try {
        const first = draft.seed === "" ? Math.floor(Math.random() * 2 ** 31) : Number(draft.seed);
        for (let at = 0; at < draft.count; at++) put(await submitted(first + at));
        say("Accepted.");
        document.querySelector(".card")?.scrollIntoView({ block: "nearest" });
      } catch (error) {
        const wrong = error.param && form.querySelector(`[name="${CSS.escape(error.param)}"]`);
        if (wrong) { wrong.setAttribute("aria-invalid", "true"); wrong.focus(); }
        throw error;
      }
    });
    send.disabled = false;
  }
  return form;
}

// Sends the draft, or other fields in its place. Latents are kept for comparisons, densities where attention was chosen.
export function submitted(seed, values = fields(), isVideo = !isImage()) {
  const { card } = model;
  if (!values.prompt?.trim()) throw new ServerError(0, { message: "Write a prompt first.", param: "prompt" });
  const body = { ...values, seed, ...(isVideo ? { return_latents: true, ...(values.attention ? { return_density: true } : {}), ...(card.previews ? { return_previews: true } : {}) } : { wait: false, ...(card.previews ? { partial_images: 3 } : {}) }) };
  const sent = [...given.images.map((file) => [isVideo ? "input_reference" : "image", file]), ...(isVideo ? [] : given.masks.map((file) => ["mask", file]))];
  const path = isVideo ? "v1/videos" : sent.length ? "v1/images/edits" : "v1/images/generations";
  if (!sent.length) return post(path, body);
  const form = new FormData();
  for (const [name, value] of Object.entries(body)) form.append(name, typeof value === "object" ? JSON.stringify(value) : String(value));
  for (const [name, file] of sent) form.append(sent.length > 1 && name !== "mask" ? `${name}[]` : name, file, file.name);
  return post(path, form);
}

export const BY_SERVER = "as the server chooses";

export function attentionText(choice) {
  if (!choice) return BY_SERVER;
  if (typeof choice === "string") return choice;
  const name = (each) => typeof each === "string" ? each : each?.backend ?? each?.name ?? "";
  const parts = [choice.default && name(choice.default), ...Object.entries(choice.per_role ?? {}).map(([role, each]) => `${role}: ${name(each)}`)].filter(Boolean);
  if (choice.schedule?.length) parts.push(`${choice.schedule.length} rule${choice.schedule.length > 1 ? "s" : ""}`);
  return parts.join(", ") || BY_SERVER;
}

function imageInputs(card, draw) {
  const list = (name) => given[name].map((file, at) => el("li", `${file.name}, ${size(file.size)} `, button("Remove", () => { given[name].splice(at, 1); draw(); }, { "aria-label": `Remove ${file.name}` })));
  const add = (name) => (chosen) => { given[name].push(...chosen); draw(); };
  const types = "image/png,image/jpeg,image/webp";
  return el("fieldset", el("legend", card.needs_image ? "Images (needed)" : "Images"), files("Image", types, true, add("images")), el("ul", list("images")),
    isImage() && card.image_fields?.includes("mask_path") ? [files("Mask", types, false, add("masks")), el("ul", list("masks"))] : null);
}

// Every other field that the server takes, by name.
function more(draw) {
  const known = Object.entries(model.fields).filter(([name]) => !OWN.test(name));
  const isShown = (name) => draft.values[name] != null || added.has(name);
  const shown = known.filter(([name]) => isShown(name)), free = known.map(([name]) => name).filter((name) => !isShown(name));
  return el("details", { open: shown.length > 0 }, el("summary", "More fields"),
    shown.map(([name, { description }]) => row(field(word(name), el("input", { name, value: textOf(valueOf(name)), onchange: (event) => { set(name, plain(event.target.value)); draw(); } }), name === "lora" ? `${description} Here: ${model.card.loras.join(", ") || "none"}.` : description))),
    field("Add a field", choice([["", "choose"], ...free.map((name) => [name, word(name)])], "", (name) => { added.add(name); draw(); })));
}

const textOf = (value) => value == null ? "" : typeof value === "string" ? value : JSON.stringify(value);

export function stateOf(job) {
  if (job.status === "queued") return `waiting, place ${job.queue_position ?? "?"}${job.eta_s == null ? "" : `, about ${duration(job.eta_s)}`}`;
  if (job.status === "in_progress") {
    const step = job.stage === "denoise" && job.step != null ? `step ${job.step} of ${job.num_steps}` : job.stage ?? "starting";
    return `${step}${job.eta_s ? `, about ${duration(job.eta_s)} left` : ""}`;
  }
  return job.status === "failed" ? (job.error?.code === "cancelled" ? "cancelled" : "failed") : "finished";
}

export const againButtons = (job, draw) => [
  button("Again", () => { save(fromJob(job)); if (draw) draw(); location.hash = "#make"; say("The settings are in the form."); }),
  button("Vary", async () => { save({ ...fromJob(job), seed: "" }); put(await submitted(Math.floor(Math.random() * 2 ** 31))); if (draw) draw(); location.hash = "#make"; }),
];

// One job, from its waiting to its result.
function resultCard(job, draw) {
  const state = el("p.state"), bar = el("progress", { max: 100, value: 0, "aria-label": "Progress" }), view = el("div.view");
  const preview = el("img", { alt: "Estimate of the result", hidden: true }), actions = el("div.row"), trouble = problem();
  const node = el("article.card", { "aria-label": job.prompt.slice(0, 80) }, el("h2", job.prompt), facts([
    ["size", `${job.size}${job.object === "image" ? "" : `, ${job.num_frames} frames`}, ${job.num_steps ?? "?"} steps, seed ${job.seed}`],
    ["attention", attentionText(job.settings.attention)]]), view, state, bar, actions, trouble.node);
  let shown = "";
  const { act } = trouble, isOld = isOver(job);
  function update(now) {
    state.textContent = now.status === "completed" ? `${duration(now.inference_time_s)}, ${size(now.bytes)}${now.has_sound ? ", with sound" : ""}` : stateOf(now);
    bar.hidden = isOver(now);
    bar.value = now.progress;
    const estimate = previews.get(now.id);
    preview.hidden = !estimate || isOver(now);
    if (estimate) preview.src = estimate;
    if (!preview.isConnected && !preview.hidden) view.append(preview);
    if (shown === now.status) return;
    shown = now.status;
    if (!isOver(now)) swap(actions, act("Cancel", async () => put(await post(`${routeOf(now)}/cancel`))));
    else if (now.status === "failed") {
      if (now.error?.code !== "cancelled") trouble.show(new Error(now.error?.message ?? "it failed"));
      swap(actions, ...againButtons(now, draw), act("Remove", () => discard(now)));
    } else {
      // What is not in sight is not read.
      const seen = new IntersectionObserver(([entry]) => {
        if (!entry.isIntersecting) return;
        seen.disconnect();
        trouble.attempt(() => finish(now));
      }, { rootMargin: "300px" });
      seen.observe(node);
      if (!isOld) say(`Finished: ${now.prompt.slice(0, 60)}`);
    }
  }
  async function finish(now) {
    const sources = await Promise.all(Array.from({ length: now.num_images ?? 1 }, (_, at) => source(pictureOf(now, at))));
    swap(view, ...sources.map((each) => clip(now.object === "image", each, now.prompt)));
    // What has just been made is played, muted, where motion is welcome.
    const video = view.querySelector("video");
    if (video && !isOld && !matchMedia("(prefers-reduced-motion: reduce)").matches) Object.assign(video, { muted: true }).play().catch(() => {});
    const name = `${now.prompt.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}-${now.seed}`;
    swap(actions, 
      link("Report", `#report/${now.id}`), ...againButtons(now, draw),
      act("Download", async () => offer(await blob(pictureOf(now)), `${name}${now.object === "image" ? ".png" : ".mp4"}`)),
      act("Recipe", async () => offer(new Blob([JSON.stringify(await recipeIn(await blob(pictureOf(now))), null, 1)], { type: "application/json" }), `${name}.json`)),
      link("Compare", `#compare/${now.id}`), act("Remove", () => discard(now)));
  }
  return { node, update };
}
