// Report of one result: what ran, who decided, density by layer and step, time by stage.
import { get, jobs, pictureOf, post, problem, source } from "./api.js";
import { clip, duration, el, facts, link, row, size } from "./dom.js";
import { explained } from "./draft.js";
import { againButtons, attentionText } from "./make.js";
import { reportView } from "./views.js";

const explainedJob = ({ settings }) => post("v1/explain", explained({ ...settings.values, attention: settings.attention, lora: settings.lora ?? [], ...(settings.preset ? { preset: settings.preset } : {}) }));

export function resultView(id) {
  const trouble = problem(), node = el("div", trouble.node);
  trouble.attempt(() => load(id, node));
  return { title: "Report", node };
}

async function load(id, node) {
  const job = jobs.get(id) ?? await get(`v1/${id.startsWith("img") ? "images" : "videos"}/${encodeURIComponent(id)}`);
  if (!job.attention_report) { node.append(el("p", job.error?.message ?? `The job is ${job.status}; it has no report.`)); return; }
  const counted = job.attention_report.density?.length;
  const expected = counted ? null : await explainedJob(job).catch(() => null);
  const media = await source(pictureOf(job));
  node.append(el("div.columns",
    el("div", clip(job.object === "image", media, job.prompt),
      el("p", job.prompt), facts([["size", job.size], ["frames", job.object === "image" ? null : `${job.num_frames} at ${job.fps} per second`], ["steps", job.num_steps], ["seed", job.seed],
        ["attention", attentionText(job.settings.attention)], ["preset", job.settings.preset], ["time", duration(job.inference_time_s)],
        ["peak memory", job.peak_memory_mb == null ? null : size(job.peak_memory_mb * 2 ** 20)], ["sha256", job.sha256.slice(0, 12)]]),
      row(againButtons(job), link("Compare", `#compare/${job.id}`))),
    el("div.report", reportView(job.attention_report, job.timings, expected))));
}
