// Elements. Every text goes in as a text node, so that no prompt, file name or message is ever read as HTML.
const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "htmlFor", "textContent", "muted", "open", "selected"]);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) node[name] = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((each) => each != null && each !== false && each !== ""));
  return node;
}

export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

// Put children of any depth in place of those of a node.
export const swap = (node, ...children) => { node.replaceChildren(); return fill(node, {}, children); };

// A part that scrolls by itself, with the keyboard too.
export const wide = (label, ...children) => el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label }, children);

// Columns of names, rows of texts or elements. On a narrow screen each row is a list of its cells beside their names.
// The roles stay where the style sheet takes the display of a table away. Columns that are "-" in every row are left out.
export function table(label, columns, rows) {
  const kept = columns.map((_, at) => at).filter((at) => !at || rows.some((row) => row[at] !== "-"));
  const head = el("tr", { role: "row", class: "names" }, kept.map((at) => el("th", { role: "columnheader", scope: "col" }, columns[at])));
  const body = rows.map((row) => el("tr", { role: "row" }, kept.map((at) => at
    ? el("td", { role: "cell", "data-name": columns[at], class: String(row[at]).length > 13 && !row[at].nodeType && "long" }, el("span", {}, row[at] ?? "-"))
    : el("th", { role: "rowheader", scope: "row" }, row[at]))));
  return wide(label, el("table", { role: "table" }, el("thead", { role: "rowgroup" }, head), el("tbody", { role: "rowgroup" }, body)));
}

// Names and values below each other; those without a value are left out.
export const facts = (pairs) => el("dl", { class: "facts" }, pairs.filter(([, value]) => value != null && value !== "")
  .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));

export const list = (texts) => texts.length ? el("ul", {}, texts.map((text) => el("li", {}, text))) : null;
export const button = (text, onclick, attributes = {}) => el("button", { type: "button", onclick, ...attributes }, text);
export const figure = (value, digits) => value == null ? "-" : Number(value).toFixed(digits);
export const word = (value) => String(value).replaceAll("_", " ");

export function duration(seconds) {
  if (seconds == null) return "-";
  if (seconds < 90) return `${seconds < 10 ? +seconds.toPrecision(2) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function size(bytes) {
  if (bytes == null) return "-";
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (bytes < 1000 || unit === "TB") return `${bytes < 10 && unit !== "B" ? bytes.toFixed(1) : Math.round(bytes)} ${unit}`;
    bytes /= 1000;
  }
}

// `0-3,7` of whole numbers in ascending order.
export function ranges(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => first === last ? `${first}` : `${first}-${last}`).join(",");
}

// Told to screen readers, and shown nowhere.
export function say(text) {
  const place = document.getElementById("said");
  if (place) place.textContent = text;
}

// A file for the user.
export function offer(content, name, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
