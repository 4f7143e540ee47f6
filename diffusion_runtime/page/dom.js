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

// name: of the element, with its classes behind points; then its attributes, where it has some, and its children.
const maker = (create) => (name, ...rest) => {
  const [tag, ...classes] = name.split("."), attributes = rest[0]?.constructor === Object ? rest.shift() : {};
  return fill(create(tag), classes.length ? { class: classes.join(" "), ...attributes } : attributes, rest);
};
export const el = maker((tag) => document.createElement(tag));
export const svg = maker((tag) => document.createElementNS(SVG, tag));
export const row = (...children) => el("div.row", children);
export const link = (text, href) => el("a.button", { href }, text);

const nameOf = (each) => each.name || each.getAttribute("aria-label") || each.textContent;

// Put children of any depth in place of those of a node. What has the focus gives it to its successor.
export function swap(node, ...children) {
  const focused = node.contains(document.activeElement) && nameOf(document.activeElement);
  node.replaceChildren();
  fill(node, {}, children);
  if (focused) [...node.querySelectorAll("input, select, textarea, button, a, summary")].find((each) => nameOf(each) === focused)?.focus();
}

// A part that scrolls by itself, with the keyboard too.
export const wide = (label, ...children) => el("div.wide", { tabindex: 0, role: "region", "aria-label": label }, children);

// Columns of names, rows of texts or elements. On a narrow screen each row is a list of its cells beside their names.
// The roles stay where the style sheet takes the display of a table away. Columns that are "-" in every row are left out.
export function table(label, columns, rows) {
  const kept = columns.map((_, at) => at).filter((at) => !at || rows.some((each) => each[at] !== "-"));
  const part = (tag, role, attributes, ...children) => el(tag, { role, ...attributes }, children);
  const cell = (given, name) => part("td", "cell", { "data-name": name, class: given === "-" ? "none" : String(given).length > 13 && !given.nodeType && "long" }, el("span", given ?? "-"));
  const line = (each) => part("tr", "row", {}, kept.map((at) => at ? cell(each[at], columns[at]) : part("th", "rowheader", { scope: "row" }, each[at])));
  return wide(label, part("table", "table", {},
    part("thead", "rowgroup", {}, part("tr", "row", {}, kept.map((at) => part("th", "columnheader", { scope: "col" }, columns[at])))),
    part("tbody", "rowgroup", {}, rows.map(line))));
}

// Names and values below each other; those without a value are left out.
export const facts = (pairs) => el("dl.facts", pairs.filter(([, value]) => value != null && value !== "")
  .map(([name, value]) => el("div", el("dt", name), el("dd", value))));

export const clip = (isImage, src, label) => isImage ? el("img", { src, alt: label }) : el("video", { src, controls: true, loop: true, playsinline: true, "aria-label": label });
export const list = (texts) => texts.length ? el("ul", texts.map((text) => el("li", text))) : null;
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
