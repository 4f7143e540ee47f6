// Queue and machine: jobs that wait and run, replicas, the model, and which backends this machine can use.
import { get, isOver, problem, post, put, refresh, routeOf, sorted, watch } from "./api.js";
import { duration, el, facts, size, swap, table } from "./dom.js";
import { model } from "./draft.js";
import { stateOf } from "./make.js";

export function machineView() {
  const queue = el("div"), state = el("div"), trouble = problem(), { card } = model;
  const act = (job) => trouble.act("Cancel", async () => put(await post(`${routeOf(job)}/cancel`)), { "aria-label": `Cancel ${job.prompt.slice(0, 40)}` });
  const draw = () => {
    const open = sorted().filter((job) => !isOver(job)).reverse(), over = sorted().filter(isOver).slice(0, 15);
    swap(queue, el("h2", `Jobs: ${open.length} open`), open.length + over.length ? table("Jobs", ["prompt", "kind", "size", "state", "progress", "action"], [...open, ...over].map((job) => [
      job.prompt.slice(0, 80), job.object, job.size, stateOf(job), isOver(job) ? (job.status === "completed" ? duration(job.inference_time_s) : "-") : `${job.progress} %`, isOver(job)
        ? job.status === "completed" ? el("a", { href: `#report/${job.id}` }, "Report") : "-" : act(job)])) : el("p", "No job was sent yet."));
  };
  const look = () => trouble.attempt(async () => {
    const health = await get("health"), peak = Math.max(0, ...sorted().map((job) => job.peak_memory_mb ?? 0)), stored = sorted().reduce((sum, job) => sum + (job.bytes ?? 0), 0);
    swap(state, el("h2", "Engines"), table("Engines", ["replica", "state", "restarts", "reason"], health.replicas.map((each) => [each.replica, each.state, each.restarts, each.reason ?? "-"])),
      facts([["peak memory of a job", peak ? size(peak * 2 ** 20) : null], ["files of these jobs", size(stored)]]));
    await refresh();
  });
  draw();
  look();
  const timer = setInterval(look, 3000), end = watch(draw);
  const about = el("div", el("h2", "Model"), facts([["name", card.id], ["device", `${card.device}, ${card.dtype}`], ["makes", card.task_types?.join(", ")],
    ["sound", card.makes_sound ? "yes" : "no"], ["previews", card.previews ?? card.no_previews], ["LoRA", card.loras.join(", ")]]),
  el("h2", "Attention backends"), table("Attention backends", ["backend", "usable", "what it is", "why not"], card.backends.toSorted((one, other) => other.usable - one.usable).map((each) => [
    each.name, each.usable ? "yes" : "no", el("div.why", each.summary), each.usable ? "-" : el("div.why", [each.reason, each.fix].filter(Boolean).join("; "))])));
  return { title: "Queue and machine", node: el("div", trouble.node, queue, state, about), stop: () => { clearInterval(timer); end(); } };
}
