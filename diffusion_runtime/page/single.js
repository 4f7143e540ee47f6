// A page of one file: an explanation or a comparison, whose values are in it.
import { el, swap } from "./dom.js";
import { comparisonFigures, comparisonPlayers, explanationView } from "./views.js";

const found = JSON.parse(document.getElementById("data").textContent), main = document.getElementById("main");
document.title = found.title;
const view = found.schema.includes("compare") ? [comparisonPlayers(found, document), comparisonFigures(found)] : explanationView(found);
swap(main, el("h1", found.title), found.subtitle && el("p", found.subtitle), view);
