// Quality against time: the results of one prompt, seed and size beside a reference among them.
import { everything, get, pictureOf, problem, sorted, source, watch } from "./api.js";
import { button, el, figure, swap, table } from "./dom.js";
import { fromJob, save } from "./draft.js";
import { choice, field } from "./inputs.js";
import { alike, settingText } from "./compare.js";
import { mark, scatter } from "./plots.js";
import { likeness } from "./players.js";

// Of two results, by their ids: a file never changes.
const measured = new Map(), SHOWN = 80;

export function qualityView() {
  const node = el("div"), trouble = problem();
  let group = null, reference = null, running = null;
  function groups() {
    const found = [];
    for (const job of sorted().filter((each) => each.status === "completed")) {
      const own = found.find((each) => alike(each[0], job));
      if (own) own.push(job);
      else found.push([job]);
    }
    return found.filter((each) => each.length > 1).sort((one, other) => other.length - one.length);
  }
  // The setting that leaves out least: most steps, then no backend of a request's own and no step cache, then the longest.
  const saves = ({ settings: { attention, values } }) => (attention ? 1 : 0) + (values.step_cache ? 1 : 0);
  const best = (own) => own.toSorted((one, other) => other.num_steps - one.num_steps || saves(one) - saves(other) || other.inference_time_s - one.inference_time_s)[0];
  async function measure(own) {
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    for (const job of own.filter((each) => each !== reference)) {
      const pair = `${job.id} ${reference.id}`;
      if (measured.has(pair)) continue;
      const sources = await Promise.all([source(pictureOf(job)), source(pictureOf(reference))]);
      const found = await likeness(...sources, reference.fps || 1, reference.object === "image" ? 1 : reference.num_frames, signal);
      if (signal.aborted) return;
      measured.set(pair, found.psnr_db);
      draw();
    }
  }
  function draw() {
    const all = groups();
    if (!all.length) {
      swap(node, trouble.node, el("div.empty", el("p", "This needs two results of one prompt, seed and size. Make one, then make it again with another setting in ", el("a", { href: "#compare" }, "Compare"), ".")));
      return;
    }
    const own = all.find((each) => group && alike(each[0], group)) ?? all[0];
    group = own[0];
    reference = best(own);
    const rows = own.map((job, at) => ({ job, at, y: job === reference ? null : measured.get(`${job.id} ${reference.id}`) ?? null }));
    const points = rows.filter(({ y }) => y !== null).map(({ job, at, y }) => ({ at, name: settingText(job), x: job.inference_time_s, y, onclick: () => load(job) }));
    const load = (job) => { save(fromJob(job)); location.hash = "#make"; };
    swap(node, 
      el("div.form.row",
        field("Results of", choice(all.map((each, at) => [at, `${each[0].prompt.slice(0, 50)}, seed ${each[0].seed}, ${each[0].size}: ${each.length}`]), all.indexOf(own), (at) => { [group] = all[at]; draw(); })),
        trouble.act("Measure", () => measure(own), { class: "main" })),
      trouble.node,
      points.length ? scatter("PSNR against the seconds of one result", "quality", points, ["seconds of one result", "PSNR, dB", 1, "dB"], reference.inference_time_s) : el("p", "Measure compares the files with the reference's, frame by frame, in this browser."),
      table("Results", ["setting", "seconds", "PSNR, dB", "action"], rows.map(({ job, at, y }) => [el("span", mark(at), ` ${settingText(job)}`), figure(job.inference_time_s, 2),
        job === reference ? "reference" : y === null ? "not measured" : figure(y, 1), button("Use this setting", () => load(job))])));
  }
  draw();
  trouble.attempt(async () => { await everything(); draw(); });
  const shipped = el("div");
  trouble.attempt(async () => figures(await get("v1/figures"), shipped));
  const end = watch((job) => { if (job?.status === "completed" && !groups().flat().every((each) => node.textContent.includes(settingText(each)))) draw(); });
  return { title: "Quality against time", node: el("div", node, shipped), stop: () => { end(); running?.abort(); } };
}

// What was measured of this model before it was shipped.
function figures({ device, num_prompts: count, rows }, node) {
  if (!rows.length) return;
  const use = (row) => { save({ values: row.values, preset: "", attention: row.attention }); location.hash = "#make"; };
  // Those that lose most would push the others into one corner.
  const points = rows.map((row, at) => ({ at, name: row.name, x: row.denoise_seconds, y: 100 * row.right, onclick: () => use(row) })).filter(({ y }) => y >= SHOWN);
  swap(node, el("h2", "Shipped figures"), el("p", `Of this model on one ${device}: the share of ${count} prompts of which everything in the clip is right. Settings below ${SHOWN} % are in the table alone.`),
    scatter("Prompts that came right against the seconds of denoising", "shipped", points, ["seconds of denoising", "prompts that came right, %", 1, "%"]),
    table("Shipped figures", ["setting", "denoising, s", "right, %", "PSNR, dB", "action"], rows.map((row, at) => [el("span", mark(at), ` ${row.name}`), figure(row.denoise_seconds, 3), figure(100 * row.right, 1),
      figure(row.psnr_db, 1), button("Use this setting", () => use(row))])));
}
