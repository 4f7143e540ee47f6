// Fields of forms: label, input and hint together; steppers that hold valid values; files that are dropped in.
import { button, el } from "./dom.js";

let number = 0;

export function field(label, input, hint) {
  const id = input.id || (input.id = `field-${++number}`);
  if (hint) input.setAttribute("aria-describedby", `${id}-hint`);
  return el("div.field", el("label", { htmlFor: id }, label), input.holder ?? input, hint ? el("small", { id: `${id}-hint` }, hint) : null);
}

export const choice = (options, value, onchange, attributes = {}) => el("select", { onchange: (event) => onchange(event.target.value), ...attributes },
  options.map((each) => {
    const [key, text, why] = Array.isArray(each) ? each : [each, each];
    return el("option", { value: key, selected: String(key) === String(value ?? ""), disabled: Boolean(why) }, why ? `${text} (${why})` : text);
  }));

// A number from `low` in steps of `step`; what is typed in between goes to the nearest. onchange: called with the number.
export function stepper(label, value, { low = 1, high = 1e9, step = 1, name }, onchange, hint) {
  const valid = (given) => Math.min(high - (high - low) % step, Math.max(low, low + Math.round((given - low) / step) * step));
  const put = (given) => { input.value = +valid(given).toFixed(6); onchange(Number(input.value)); };
  const input = el("input", { type: "number", value: value ?? "", min: low, max: high < 1e9 ? high : null, step, name, inputmode: "numeric",
    onchange: () => put(input.value === "" ? value ?? low : Number(input.value)) });
  input.holder = el("div.stepper", button("−", () => put(Number(input.value || low) - step), { "aria-label": `less: ${label}` }), input,
    button("+", () => put(Number(input.value || low) + step), { "aria-label": `more: ${label}` }));
  return field(label, input, hint);
}

// A place for files, by a button and by dropping them. on: called with the list.
export function files(label, accept, many, on) {
  const input = el("input", { type: "file", accept, multiple: many, onchange: () => { on([...input.files]); input.value = ""; } });
  const node = el("div.drop", field(label, input));
  takeDrops(node, on);
  return node;
}

export function takeDrops(node, on) {
  node.addEventListener("dragover", (event) => { event.preventDefault(); event.stopPropagation(); node.classList.add("over"); });
  node.addEventListener("dragleave", () => node.classList.remove("over"));
  node.addEventListener("drop", (event) => {
    event.preventDefault();
    event.stopPropagation();
    node.classList.remove("over");
    if (event.dataTransfer.files.length) on([...event.dataTransfer.files]);
  });
}

// The value that a text stands for: a number, a list, a word.
export function plain(text) {
  const given = text.trim();
  try {
    return given === "" ? null : JSON.parse(given);
  } catch {
    return given;
  }
}
