// What a generation would run, what one ran, and several beside each other: of `serve`, `explain --html` and `compare --html`.
import { duration, el, facts, figure, list, ranges, size, table } from "./dom.js";
import { bars, heatMap, legend, lines, mark, scatter } from "./plots.js";
import { overlay, players } from "./players.js";

const decider = (source) => source === "cli" ? "the request, or a flag" : source;
const optionsOf = (options) => Object.keys(options ?? {}).length ? ` ${JSON.stringify(options)}` : "";
const lineBreaks = (texts) => texts.map((text) => el("div", text));
const tera = (value) => { const found = value / 1e12; return !value ? "-" : found >= 1000 ? Math.round(found).toLocaleString("en") : String(+found.toPrecision(4)); };
const described = (backend, share) => share === null ? `${backend}, the content decides how many pairs`
  : share === 1 || backend === "not run" ? backend : `${backend}, ${+share.toPrecision(3)} of the pairs`;
const section = (title, ...children) => el("section", el("h2", title), children);

// The schedule of an explanation as one map per role. onselect(role, steps, layers).
export function scheduleMaps(found, onselect) {
  const roles = grouped(found.schedule);
  const kinds = new Map();
  const maps = [...roles].map(([role, rows]) => {
    const cells = rows.map((row) => ({ layer: row.index, cells: row.backends.map((kind, step) => {
      const share = row.density[step], text = described(kind, share);
      kinds.set(text, share);
      return { kind, share, text };
    }) }));
    const commits = new Map();
    for (const row of rows) if (row.commit) commits.set(row.commit, [...(commits.get(row.commit) ?? []), row.index]);
    const ways = [...commits].map(([backend, layers]) => `${backend} in layers ${ranges(layers)}`).join(", ");
    const steps = found.num_first_chunk_steps == null ? `${found.num_steps} steps`
      : `${found.num_first_chunk_steps} steps of the first chunk and ${found.num_steps} of the others`;
    return [el("h3", role), heatMap(`${role}: layers from top to bottom, steps from left to right`, cells, onselect && ((...chosen) => onselect(role, ...chosen)), stepsText(found)),
      el("small", `${rows.length} layers from top to bottom, ${steps} from left to right${ways && `; commits: ${ways}`}`)];
  });
  return [maps, legend([...kinds])];
}

// A causal model's first chunk may have steps of its own, which a schedule has before those of the others.
function stepsText({ num_first_chunk_steps: own }) {
  const text = (first, last, of) => `${first === last ? "step" : "steps"} ${first === last ? first : `${first}-${last}`}${of}`;
  if (own == null) return (first, last) => text(first, last, "");
  return (first, last) => [first < own && text(first, Math.min(last, own - 1), " of the first chunk"),
    last >= own && text(Math.max(0, first - own), last - own, " of the others")].filter(Boolean).join(", ");
}

function grouped(rows) {
  const found = new Map();
  for (const row of rows) found.set(row.role, [...(found.get(row.role) ?? []), row]);
  return found;
}

export function explanationFacts(found) {
  const { request, grid, model } = found, tokens = grid[0] * grid[1] * grid[2];
  return facts([
    ["device", `${model.device}, ${model.dtype}`],
    ["size", `${request.num_frames} frame(s) of ${request.width} x ${request.height}`],
    ["tokens", `${tokens} in a grid of ${grid.join(" x ")}${found.num_text_tokens ? ` and ${found.num_text_tokens} of text` : ""}`],
    ["forward passes", found.passes],
    ["expected", found.step],
    ["quantization", found.quantization],
  ]);
}

export const plannedAttention = (found) => table("Attention that would run", ["role", "when", "layers", "backend", "why"], found.attention.map((row) => [
  row.role, row.when, ranges(row.layers), row.backend + optionsOf(row.options), el("div.why", lineBreaks([
    `${decider(row.source)}: ${row.reason}`, ...row.rejected.map((each) => `not ${each[0] ?? each.backend}: ${each[1] ?? each.reason}`),
    ...(row.dense ? [`dense calls: ${row.dense.backend} (${decider(row.dense.source)}: ${row.dense.reason})`] : [])]))]));

const computedBy = (found) => table("What would compute it", ["role", "layers", "steps", "backend", "computed by"], found.implementations.map((row) => [
  row.role, row.layers, row.steps, row.backend, row.implementation ?? "found at the call"]));

const costs = (found) => table("What the request would cost", ["part", "T operations", "computed", "expected time"], found.parts.map((part) => [
  part.name, tera(part.operations), (found.kept_is_upper_bound && part.kept ? "at most " : "") + tera(part.kept), bars([["", part.share, `${Math.round(100 * part.share)} %`]])]));

const memoryOf = ({ memory }) => memory && section("Memory that it would take", facts([...Object.entries(memory.phases).map(([phase, bytes]) => [phase, size(bytes)]),
  ["offload", `${memory.offload}: ${memory.reason}`]]), list(memory.notes));

// found: what POST /v1/explain answers, and `explain` writes.
export const explanationView = (found, onselect) => [
  explanationFacts(found),
  section("Attention that would run", plannedAttention(found), list(found.remarks)),
  section("What would compute it", computedBy(found)),
  section("Pairs computed, by layer and step", scheduleMaps(found, onselect)),
  section("What the request would cost", costs(found), el("p", el("small", {},
    "Expected time: by what one H200 reached in bfloat16; `diffusion-runtime bench generate` measures it."))),
  memoryOf(found),
];

export function timeByStage(timings) {
  const stages = Object.entries(timings ?? {}).filter(([, seconds]) => seconds > 0);
  const total = stages.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  return bars(stages.map(([stage, seconds]) => [stage, seconds / total, duration(seconds)]));
}

// report: of a result. expected: an explanation of the same settings, whose shares are shown where none were counted.
export function reportView(report, timings, expected) {
  const counted = grouped(report.density ?? []);
  const maps = [...counted].map(([role, rows]) => [el("h3", role), heatMap(`${role}: pairs computed, layers from top to bottom, steps from left to right`,
    rows.map((row) => ({ layer: row.layer, cells: row.steps.map((share) => ({ kind: "", share: share ?? undefined, text: share == null ? "no call" : `${+share.toPrecision(3)} of the pairs` })) })))]);
  return [
    section("Attention that ran", el("p", `${report.num_calls} calls were counted.`),
      table("Attention that ran", ["role", "backend", "implementation", "calls", "layers", "steps", "who decided", "why"], report.rows.map((row) => [
        row.role + (row.is_guided ? ", guided" : ""), row.backend, row.implementation, row.count, row.layers, row.steps, decider(row.source), el("div.why", row.reason)])),
      list([...report.libraries.map((each) => `${each.component}: ${each.library}'s own attention (${each.implementation})`), ...report.notes])),
    section("Pairs computed, by layer and step", maps.length ? maps : expected ? [el("p", "Expected, not counted."), scheduleMaps(expected)]
      : el("p", "They were not counted.")),
    section("Time by stage", timeByStage(timings)),
  ];
}

const STAGES = ["text", "denoise", "decode"];
const ratio = (found) => found == null ? "-" : `${found.toFixed(2)}x`;

// A row of fewer steps has the colour of the reference, whose setting it is.
const colourOf = (row, at) => row.kind === "fewer_steps" ? 0 : at;

// found: as `compare` writes it, with a `source` of each clip's picture and a `speed` of each row, as a text.
export function comparisonPlayers(found, scope) {
  const shown = found.rows.map((row, at) => [row, at]).filter(([row]) => row.clips.length);
  const note = (clip) => clip.note ?? (clip.psnr_db == null ? "reference" : `${clip.psnr_db.toFixed(1)} dB`);
  const groups = found.prompts.map(({ prompt, seed }, index) => ({ title: el("h2", `${prompt}, seed ${seed}`),
    clips: shown.map(([row, at]) => ({ at, colour: colourOf(row, at), name: row.name, note: note(row.clips[index]), source: row.clips[index].source, label: `${row.name}: ${prompt}` })) }));
  // All clips of the page have one clock.
  const all = players(groups.flatMap((group) => group.clips), found.size.fps || 1, found.size.num_frames, scope), first = all.media.slice(0, shown.length);
  return [all.clock, groups.map((group, index) => [group.title, el("div.clips", all.figures.slice(index * shown.length, (index + 1) * shown.length))]),
    first.length > 1 ? el("details", el("summary", "Two on top of each other: slider, difference"), overlay(first, groups[0].clips)) : null];
}

export function comparisonFigures(found) {
  const { rows } = found, reference = rows[0];
  const name = (row, at) => el("span", mark(at, colourOf(row, at)), ` ${row.name}${row.kind === "fewer_steps" ? `, in the time of ${row.beside}` : ""}`);
  const quality = rows.map((row, at) => [name(row, at), row.num_inference_steps ?? "-", figure(row.final_latent_l2, 3), firstOver(row, found.threshold), figure(row.psnr_db, 1),
    figure(row.ssim, 3), figure(row.difference, 2), figure(row.lpips, 3), row.accuracy ? accuracy(row.accuracy) : "-", figure(row.clip_score, 1), row.speed ?? ratio(row.speedup)]);
  const cost = rows.map((row, at) => [name(row, at), ...STAGES.map((stage) => figure(row.seconds[stage], 2)), figure(row.seconds_per_step, 3), figure(row.total_seconds, 2),
    figure(row.attention_seconds, 2), figure(row.attention_density, 2), memoryText(row.peak_memory)]);
  const series = rows.map((row, at) => ({ at, name: row.name, row })).filter(({ row }) => row.kind === "setting")
    .map((each) => ({ ...each, points: each.row.latent_l2_per_step.map((value, step) => [step, value]).filter(([, value]) => value != null) })).filter((each) => each.points.length);
  const points = rows.map((row, at) => ({ at, colour: colourOf(row, at), name: row.name, x: row.total_seconds, y: row.psnr_db, square: row.kind === "fewer_steps" })).filter((each) => each.x != null && each.y != null);
  return [
    section("Quality", table("Quality", ["setting", "steps", "latent L2", `first step over ${found.threshold}`, "PSNR, dB", "SSIM", "mean difference", "LPIPS", "all right (95 %)", "CLIP", "speed"], quality)),
    section("Time and memory", table("Time and memory", ["setting", ...STAGES.map((stage) => `${stage}, s`), "per step, s", "total, s", "attention, s", "density", "memory"], cost)),
    series.length ? section("Distance from the reference, step by step", lines("Relative L2 distance of the latents by step", "divergence", series, ["step", "relative L2 of the latents"], found.threshold)) : null,
    points.length && reference.total_seconds != null ? section("Quality against time",
      scatter("PSNR against the seconds of one clip", "quality", points, ["seconds of one clip", "PSNR, dB", 1, "dB"], reference.total_seconds),
      points.some((each) => each.square) ? el("p", el("small", "Circles: settings. Squares: the reference with as many steps as take a setting's time.")) : null) : null,
    found.remarks.length ? section("Remarks", list(found.remarks)) : null,
  ];
}

function firstOver(row, threshold) {
  if (row.kind === "reference" || row.latent_l2_per_step.every((value) => value == null)) return "-";
  const step = row.latent_l2_per_step.findIndex((value) => value != null && value > threshold);
  return step < 0 ? "none" : step;
}

const accuracy = ({ joint }) => `${joint.rate.toFixed(2)} (${joint.low.toFixed(2)} to ${joint.high.toFixed(2)})`;
const memoryText = (peak) => { const bytes = peak?.device ?? peak?.machine; return bytes == null ? "-" : size(bytes); };
