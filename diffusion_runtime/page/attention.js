// Attention: a backend for every role with its options, rules for some layers and steps, and what that would run.
import { post, problem } from "./api.js";
import { button, el, link, row, say, swap } from "./dom.js";
import { draft, explained, fields, model, save } from "./draft.js";
import { choice, field, plain } from "./inputs.js";
import { BY_SERVER } from "./make.js";
import { explanationView } from "./views.js";

const WAIT = 250;
const backend = (name) => model.card.backends.find((each) => each.name === name);

// Why a role cannot have a backend; nothing where it can.
const refusal = (each, role) => !each.usable ? each.reason
  : ["self", "cross"].includes(role) && !each.categories.includes(role) ? `not made for ${role}` : "";

// The parts of a choice in any form that requests take, as { default, per_role, schedule } of { backend, extra }.
function parts(given) {
  const spec = (each) => typeof each === "string" ? { backend: each } : { backend: each.backend ?? each.name ?? "auto", extra: each.extra ?? each.options ?? {} };
  if (!given) return { roles: {}, schedule: [] };
  const isMapping = typeof given === "object" && ("default" in given || "per_role" in given || "schedule" in given);
  const whole = isMapping ? given : { default: given };
  const roles = Object.fromEntries(Object.entries(whole.per_role ?? {}).map(([role, each]) => [role, spec(each)]));
  if (whole.default) roles[""] = spec(whole.default);
  return { roles, schedule: (whole.schedule ?? []).map((rule) => ({ ...rule, ...spec(rule) })) };
}

function put({ roles, schedule }) {
  const plainSpec = ({ backend: name, extra }) => ({ backend: name, ...(Object.keys(extra ?? {}).length ? { extra } : {}) });
  const per = Object.fromEntries(Object.entries(roles).filter(([role, each]) => role && each?.backend).map(([role, each]) => [role, plainSpec(each)]));
  const rules = schedule.map(({ role, steps, layers, phase, chunks, ...spec }) => ({ ...(role ? { role } : {}), ...(steps !== "" && steps != null ? { steps } : {}),
    ...(layers !== "" && layers != null ? { layers } : {}), ...(phase ? { phase } : {}), ...(chunks != null ? { chunks } : {}), ...plainSpec(spec) }));
  const found = { ...(roles[""]?.backend ? { default: plainSpec(roles[""]) } : {}), ...(Object.keys(per).length ? { per_role: per } : {}), ...(rules.length ? { schedule: rules } : {}) };
  save({ attention: Object.keys(found).length ? found : null });
}

export function attentionView() {
  const state = parts(draft.attention), form = el("div.form"), found = el("div.report", { "aria-busy": "true" }), trouble = problem();
  const roles = model.card.attention_roles.toSorted((one, other) => (other === "self") - (one === "self"));
  let timer = null, asked = 0;
  const changed = () => { put(state); draw(); clearTimeout(timer); timer = setTimeout(ask, WAIT); };
  async function ask() {
    const mine = ++asked;
    found.setAttribute("aria-busy", "true");
    try {
      const answer = await post("v1/explain", explained(fields()));
      if (mine !== asked) return;
      trouble.node.hidden = true;
      swap(found, explanationView(answer, drawn));
      say("The table of what would run has changed.");
    } catch (error) {
      if (mine === asked) trouble.show(error);
    }
    if (mine === asked) found.setAttribute("aria-busy", "false");
  }
  function drawn(role, [first, last], [top, bottom]) {
    state.schedule.push({ role, steps: first === last ? first : `${first}-${last}`, layers: top === bottom ? top : `${top}-${bottom}`, backend: "torch_sdpa", extra: {} });
    changed();
  }
  function draw() {
    swap(form, 
      ["", ...roles].map((role) => picker(role || "every role", role, state.roles[role], (spec) => { state.roles[role] = spec; changed(); })),
      el("h2", "Schedule"), el("p", "Other backends for some layers and steps. A rule comes before the choices above; the first that holds decides. Draw over a map to add one."),
      state.schedule.map((rule, at) => el("fieldset", el("legend", `Rule ${at + 1}`),
        field("Role", choice([["", "every role"], ...roles.map((role) => [role, role])], rule.role, (role) => { rule.role = role; changed(); }, { name: `role-${at}` })),
        el("div.pair", ["steps", "layers"].map((name) => field(name === "steps" ? "Steps" : "Layers",
          el("input", { name: `${name}-${at}`, value: rule[name] ?? "", placeholder: "all", onchange: (event) => { rule[name] = event.target.value.trim(); changed(); } }), "0-3, -1: the last"))),
        picker("Backend", rule.role, rule, (spec) => { Object.assign(rule, { backend: "torch_sdpa", extra: {} }, spec); changed(); }, `rule-${at}`),
        button("Remove the rule", () => { state.schedule.splice(at, 1); changed(); }, { name: `remove-${at}` }))),
      row(button("Add a rule", () => { state.schedule.push({ role: "", steps: "0", layers: "", backend: "torch_sdpa", extra: {} }); changed(); }, { name: "add" }),
        button("As the server chooses", () => { state.roles = {}; state.schedule = []; changed(); }, { name: "none" }),
        link("To Make", "#make")),
      trouble.node);
  }
  draw();
  ask();
  return { title: "Attention", node: el("div.columns", form, found), stop: () => clearTimeout(timer) };
}

// A backend and its options. onchange: called with { backend, extra }, or with nothing.
function picker(label, role, spec, onchange, name = `backend-${role}`) {
  const options = [["", BY_SERVER], ...model.card.backends.map((each) => [each.name, each.name, refusal(each, role)])];
  const chosen = spec?.backend && backend(spec.backend);
  // Several names in order of preference are shown as they are.
  if (spec?.backend && !chosen) options.push([spec.backend, spec.backend]);
  const extra = spec?.extra ?? {};
  const set = (key, value) => { const { [key]: _, ...others } = extra; onchange({ backend: spec.backend, extra: value == null ? others : { ...others, [key]: value } }); };
  const input = (option) => option.choices
    ? choice([["", `${option.default}`], ...option.choices.filter((each) => each !== option.default).map((each) => [JSON.stringify(each), String(each)])],
      option.name in extra ? JSON.stringify(extra[option.name]) : "", (value) => set(option.name, value === "" ? null : JSON.parse(value)), { name: `${name}.${option.name}` })
    : el("input", { name: `${name}.${option.name}`, value: option.name in extra ? JSON.stringify(extra[option.name]).replace(/^"|"$/g, "") : "", placeholder: JSON.stringify(option.default) ?? "",
      onchange: (event) => set(option.name, plain(event.target.value)) });
  return el("div.picker",
    field(label, choice(options, spec?.backend ?? "", (value) => onchange(value ? { backend: value, extra: {} } : undefined), { name }), chosen?.summary),
    chosen?.options.length ? el("div.options", chosen.options.map((option) => field(option.name, input(option)))) : null);
}
