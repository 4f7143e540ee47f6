// Compare: two to four results of one prompt, seed and size, under one clock; those that are missing are made here.
import { bytes, everything, get, isOver, jobs, pictureOf, problem, put, routeOf, sorted, source, watch } from "./api.js";
import { duration, el, say, swap } from "./dom.js";
import { draft, fieldsOf, fromJob, model } from "./draft.js";
import { choice, field } from "./inputs.js";
import { BY_SERVER, attentionText, stateOf, submitted } from "./make.js";
import { likeness } from "./players.js";
import { comparisonFigures, comparisonPlayers } from "./views.js";

const MOST = 4, THRESHOLD = 0.1;
export const alike = (one, other) => one.object === other.object && one.prompt === other.prompt && one.seed === other.seed && one.size === other.size && one.num_frames === other.num_frames;
export const settingText = (job) => [job.settings.preset, `${job.num_steps} steps`, attentionText(job.settings.attention)].filter(Boolean).join(", ");

export function compareView(argument) {
  const chosen = argument.split(",").filter((id) => jobs.has(id)), trouble = problem(), shown = el("div"), list = el("div");
  let stopped = new AbortController(), now = "";
  const finished = () => sorted().filter((job) => job.status === "completed");
  const first = () => jobs.get(chosen[0]);
  function drawList() {
    const base = first(), open = sorted().filter((job) => !isOver(job));
    const rows = finished().filter((job) => !base || alike(job, base));
    swap(list, 
      rows.length ? el("fieldset", el("legend", base ? `Results of “${base.prompt.slice(0, 60)}”, seed ${base.seed}, ${base.size}` : "Choose a result"),
        rows.slice(0, 40).map((job) => el("label.pick", el("input", { type: "checkbox", checked: chosen.includes(job.id), disabled: !chosen.includes(job.id) && chosen.length >= MOST,
          onchange: (event) => { if (event.target.checked) chosen.push(job.id); else chosen.splice(chosen.indexOf(job.id), 1); changed(); } }),
        el("span", base ? settingText(job) : `${job.prompt.slice(0, 60)}, seed ${job.seed}: ${settingText(job)}`, el("small", ` ${duration(job.inference_time_s)}`)))))
        : el("div.empty", el("p", "There is no result yet. ", el("a", { href: "#make" }, "Make one"), ", then compare it here with the same prompt and seed under other settings.")),
      el("p", open.slice(0, 4).map((job) => `${settingText(job)}: ${stateOf(job)}`).join("; ")));
  }
  function changed() {
    drawList();
    others.hidden = !first();
    const ready = chosen.filter((id) => jobs.get(id)?.status === "completed");
    if (ready.join() === now) return;
    now = ready.join();
    history.replaceState(null, "", `#compare/${chosen.join(",")}`);
    stopped.abort();
    stopped = new AbortController();
    swap(shown);
    if (ready.length > 1) trouble.attempt(() => compared(ready.map((id) => jobs.get(id)), shown, stopped.signal));
  }
  // The first result again, under another attention; with other steps or another preset it is made in Make.
  const usable = model.card.backends.filter((each) => each.usable), role = model.card.attention_roles.includes("self") ? "self" : model.card.attention_roles[0];
  const attention = choice([["", BY_SERVER], ["draft", `as in Attention: ${attentionText(draft.attention)}`], ...usable.map((each) => [each.name, `${each.name} for ${role}`])], "draft", () => {});
  async function make() {
    const base = first(), isVideo = base.object === "video", { attention: _, ...own } = fieldsOf(fromJob(base), isVideo);
    const other = attention.value === "draft" ? draft.attention : attention.value && { per_role: { [role]: { backend: attention.value } } };
    const job = await submitted(Number(base.seed), { ...own, ...(other ? { attention: other } : {}) }, isVideo);
    put(job);
    if (chosen.length < MOST) chosen.push(job.id);
    changed();
  }
  const others = el("div.form.row", field("Make the first one again, with another attention", attention), trouble.act("Make it", make, { class: "main" }));
  changed();
  // Older ones too, of which the address may speak.
  const later = argument.split(",").filter((id) => !jobs.has(id));
  trouble.attempt(async () => { await everything(); chosen.push(...later.filter((id) => jobs.has(id)).slice(0, MOST - chosen.length)); changed(); });
  const end = watch(changed);
  return { title: "Compare", node: el("div", list, others, trouble.node, shown), stop: () => { end(); stopped.abort(); } };
}

// found: jobs, the reference first.
async function compared(found, node, signal) {
  const sources = await Promise.all(found.map((job) => source(pictureOf(job)))), reference = found[0];
  const isVideo = reference.object === "video", count = isVideo ? reference.num_frames : 1;
  const doc = { size: { num_frames: count, fps: reference.fps }, prompts: [{ prompt: reference.prompt, seed: reference.seed }], threshold: THRESHOLD, remarks: [],
    rows: found.map((job, at) => ({ name: settingText(job), kind: at ? "setting" : "reference", num_inference_steps: job.num_steps, latent_l2_per_step: [], seconds: job.timings ?? {},
      total_seconds: job.inference_time_s, seconds_per_step: job.timings?.denoise / job.num_steps, speedup: reference.inference_time_s / job.inference_time_s,
      peak_memory: job.peak_memory_mb == null ? null : { device: job.peak_memory_mb * 2 ** 20 }, clips: [{ source: sources[at], note: at ? "" : "reference" }] })) };
  if (signal.aborted) return;
  const figures = el("div"), draw = () => swap(figures, comparisonFigures(doc));
  swap(node, comparisonPlayers(doc, document), figures);
  draw();
  const tracks = await Promise.all(found.map((job) => latents(job)));
  doc.rows.forEach((row, at) => { if (at) Object.assign(row, distances(tracks[at], tracks[0])); });
  if (found.length > 1 && !tracks.every(Boolean)) doc.remarks.push("Distances by step need latents that were kept (return_latents), as of videos that this page has asked for.");
  doc.remarks.push("PSNR, SSIM (of blocks of 8 x 8 pixels) and mean difference (of values from 0 to 255): of the files, as this browser decodes them.");
  const shipped = await get("v1/figures"), right = found.map((job) => shippedRow(shipped, job)?.right);
  if (right.some((each) => each != null)) {
    doc.rows.forEach((row, at) => { if (right[at] != null) row.accuracy = { joint: interval(right[at], shipped.num_prompts) }; });
    doc.remarks.push(`All right: the share of ${shipped.num_prompts} prompts of which everything in the clip is right, of the shipped figures of this setting on one ${shipped.device}.`);
  }
  draw();
  for (const [at, row] of doc.rows.entries()) {
    if (at) Object.assign(row, await likeness(sources[at], sources[0], reference.fps || 1, count, signal));
    if (signal.aborted) return;
    draw();
  }
  say("The comparison is complete.");
}

// The shipped figure of the setting of a job; none where any value differs.
function shippedRow({ rows }, { settings: { values, attention, lora } }) {
  const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
  return lora?.length ? null : rows.find((row) => same(row.attention, attention)
    && Object.keys(row.values).every((name) => name in values)
    && Object.entries(values).every(([name, value]) => same(value, row.values[name] ?? model.card.defaults[name])));
}

// Wilson's interval of 95 %.
function interval(rate, count) {
  const z = 1.96, middle = (rate + z * z / 2 / count) / (1 + z * z / count), half = z * Math.sqrt(rate * (1 - rate) / count + (z / 2 / count) ** 2) / (1 + z * z / count);
  return { rate, low: middle - half, high: middle + half };
}

// The kept samples of a result, [[noise level, values]] by step; null where none were kept.
async function latents(job) {
  if (!job.recorded.includes("latents")) return null;
  try {
    const values = new Float32Array(await bytes(`${routeOf(job)}/content?variant=latents`)), length = (values.length - 1) / values[0];
    return Array.from({ length: values[0] }, (_, step) => [values[1 + step * length], values.subarray(2 + step * length, 1 + (step + 1) * length)]);
  } catch {
    return null;
  }
}

function distances(track, reference) {
  if (!track || !reference) return {};
  const distance = (own, its) => {
    if (own.length !== its.length) return null;
    let error = 0, whole = 0;
    for (let at = 0; at < own.length; at++) { error += (own[at] - its[at]) ** 2; whole += its[at] ** 2; }
    return Math.sqrt(error / Math.max(whole, 1e-24));
  };
  // Other noise levels belong to another schedule, whose steps are no pairs.
  const same = track.length === reference.length;
  return { latent_l2_per_step: same ? track.map(([level, values], step) => Math.abs(level - reference[step][0]) < 1e-4 ? distance(values, reference[step][1]) : null) : [],
    final_latent_l2: distance(track.at(-1)[1], reference.at(-1)[1]) };
}
