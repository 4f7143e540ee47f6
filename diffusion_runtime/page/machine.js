// Queue and machine: jobs that wait and run, replicas, the model, and which backends this machine can use.
import { get, isOver, problem, post, put, refresh, routeOf, sorted, text, watch } from "./api.js";
import { button, duration, el, facts, size, swap, table, word } from "./dom.js";
import { model } from "./draft.js";
import { stateOf } from "./make.js";

export function machineView() {
  const queue = el("div"), state = el("div"), trouble = problem(), { card } = model;
  const act = (job) => button("Cancel", async () => { try { put(await post(`${routeOf(job)}/cancel`)); } catch (error) { trouble.show(error); } }, { "aria-label": `Cancel ${job.prompt.slice(0, 40)}` });
  const draw = () => {
    const open = sorted().filter((job) => !isOver(job)).reverse(), over = sorted().filter(isOver).slice(0, 15);
    const focused = document.activeElement?.getAttribute("aria-label");
    swap(queue, el("h2", {}, `Jobs: ${open.length} open`), open.length + over.length ? table("Jobs", ["prompt", "kind", "size", "state", "progress", ""], [...open, ...over].map((job) => [
      job.prompt.slice(0, 80), job.object, job.size, stateOf(job), isOver(job) ? (job.status === "completed" ? duration(job.inference_time_s) : "-") : `${job.progress} %`, isOver(job)
        ? job.status === "completed" ? el("a", { href: `#report/${job.id}` }, "Report") : "-" : act(job)])) : el("p", {}, "No job was sent yet."));
    if (focused) queue.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  };
  async function look() {
    try {
      const [health, metrics] = await Promise.all([get("health"), text("metrics").catch(() => "")]);
      // Names of metrics are the server's own; a value is the number behind the last space.
      const value = (name) => metrics.split("\n").filter((line) => line.startsWith(`diffusion_runtime_${name}`) && !line.startsWith("#")).map((line) => Number(line.slice(line.lastIndexOf(" "))))[0];
      swap(state, el("h2", {}, "Engines"), table("Engines", ["replica", "state", "restarts", "reason"], health.replicas.map((each) => [each.replica, each.state, each.restarts, each.reason ?? "-"])),
        facts([["stored results", value("storage_bytes") == null ? null : size(value("storage_bytes"))], ["peak memory", value("peak_memory_bytes") ? size(value("peak_memory_bytes")) : null]]));
      await refresh(30);
      trouble.clear();
    } catch (error) {
      trouble.show(error);
    }
  }
  draw();
  look();
  const timer = setInterval(look, 3000), end = watch(draw);
  const unusable = card.backends.filter((each) => !each.usable);
  const about = el("div", {}, el("h2", {}, "Model"), facts([["name", card.id], ["family", card.family], ["device", `${card.device}, ${card.dtype}`], ["processes", card.num_gpus], ["makes", card.task_types?.join(", ")],
    ["sound", card.makes_sound ? "yes" : "no"], ["previews", card.previews ?? card.no_previews], ["LoRA", card.loras.join(", ")], ["defaults", Object.entries(card.defaults).map(([name, given]) => `${word(name)} ${given === "" ? "none" : given}`).join(", ")]]),
  el("h2", {}, "Attention backends"), table("Attention backends", ["backend", "usable", "what it is", "why not"], [...card.backends.filter((each) => each.usable), ...unusable].map((each) => [
    each.name, each.usable ? "yes" : "no", el("div", { class: "why" }, each.summary), each.usable ? "-" : el("div", { class: "why" }, [each.reason, each.fix].filter(Boolean).join("; "))])));
  return { title: "Queue and machine", node: el("div", {}, trouble.node, queue, state, about), stop: () => { clearInterval(timer); end(); } };
}
