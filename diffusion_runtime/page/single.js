// A page of one file: an explanation or a comparison, whose values are in it.
import { el } from "./dom.js";
import { comparisonView, explanationView } from "./views.js";

const found = JSON.parse(document.getElementById("data").textContent), main = document.getElementById("main");
document.title = found.title;
const view = found.schema.includes("compare") ? comparisonView(found, document) : explanationView(found);
main.append(el("h1", {}, found.title), found.subtitle ? el("p", {}, found.subtitle) : "", ...view.flat(Infinity).filter(Boolean));
