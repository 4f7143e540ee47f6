// The page: its views by the part of the address behind #, their links, and what is known of the model.
import { get, refresh } from "./api.js";
import { el } from "./dom.js";
import { model } from "./draft.js";
import { attentionView } from "./attention.js";
import { compareView } from "./compare.js";
import { machineView } from "./machine.js";
import { makeView } from "./make.js";
import { qualityView } from "./quality.js";
import { resultView } from "./report.js";
import { streamsView } from "./streams.js";

const VIEWS = { make: ["Make", makeView], attention: ["Attention", attentionView], compare: ["Compare", compareView], quality: ["Quality", qualityView],
  streams: ["Streams", streamsView], machine: ["Queue", machineView], report: [null, resultView] };
const main = document.getElementById("main");
let open = null;

function show(isFirst) {
  const [name, argument = ""] = location.hash.slice(1).split("/");
  const [, view] = VIEWS[name] ?? VIEWS.make;
  open?.stop?.();
  open = view(argument);
  main.replaceChildren(el("h1", open.title), open.node);
  document.title = `${open.title}: ${model.card.id}`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name in VIEWS ? name : "make"}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!isFirst) { main.focus(); scrollTo(0, 0); }
}

async function start() {
  try {
    const [list, api] = await Promise.all([get("v1/models"), get("openapi.json")]);
    model.card = list.data[0];
    if (!model.card.defaults) throw new Error("The model is being loaded. This page goes on by itself.");
    model.fields = api.components.schemas.VideoRequest.properties;
    await refresh();
  } catch (error) {
    if (!main.textContent.includes(error.message)) main.replaceChildren(el("h1", "Not ready"), el("p", { role: "alert" }, error.message));
    setTimeout(start, 400);
    return;
  }
  const nav = document.getElementById("nav");
  document.getElementById("model").textContent = model.card.id;
  nav.append(...Object.entries(VIEWS).filter(([name, [title]]) => title && (name !== "streams" || model.card.streams)).map(([name, [title]]) => el("a", { href: `#${name}` }, title)));
  addEventListener("hashchange", () => show(false));
  show(true);
}

start();
