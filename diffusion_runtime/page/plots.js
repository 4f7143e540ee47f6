// Plots as inline SVG. Colours are classes (c0 to c7, d0 to d7), so that the style sheet gives both themes theirs.
import { el, svg, wide } from "./dom.js";

const WIDTH = 640, HEIGHT = 300, LEFT = 58, RIGHT = 16, TOP = 18, BOTTOM = 44, TICKS = 5;

export const letter = (at) => String.fromCharCode(65 + at % 26) + (at < 26 ? "" : Math.floor(at / 26) + 1);
export const mark = (at, colour = at) => el("span", { class: `mark c${colour % 8}` }, letter(at));

function axis(low, high, start, length, up) {
  if (!(high > low)) high = low + 1;
  const at = (value) => +(start + length * (up ? 1 - (value - low) / (high - low) : (value - low) / (high - low))).toFixed(1);
  // 1, 2 or 5 times a power of ten.
  const power = 10 ** Math.floor(Math.log10((high - low) / TICKS));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= (high - low) / TICKS * (1 - 1e-9));
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index <= high / step + 1e-9; index++) ticks.push([at(index * step), String(+(index * step).toPrecision(6))]);
  return { at, ticks };
}

function frame(label, id, x, y, draw, role = "img") {
  const across = axis(x.low, x.high, LEFT, WIDTH - LEFT - RIGHT), upwards = axis(y.low, y.high, TOP, HEIGHT - TOP - BOTTOM, true);
  const bottom = HEIGHT - BOTTOM, right = WIDTH - RIGHT, middle = (TOP + bottom) / 2;
  return wide(label, svg("svg.plot", { id, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role, "aria-label": label },
    across.ticks.map(([at, text]) => [svg("line", { x1: at, x2: at, y1: TOP, y2: bottom, class: "grid" }),
      svg("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, text)]),
    upwards.ticks.map(([at, text]) => [svg("line", { x1: LEFT, x2: right, y1: at, y2: at, class: "grid" }),
      svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, text)]),
    svg("text", { x: (LEFT + right) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, x.name),
    svg("text", { x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` }, y.name),
    draw({ x: across.at, y: upwards.at, right, bottom })));
}

// series: [{ at, name, points: [[x, y]] }]; at: their letter and colour. threshold: a dashed line, or null.
export function lines(label, id, series, names, threshold = null) {
  const points = series.flatMap((each) => each.points);
  const top = 1.05 * Math.max(threshold ?? 0, ...points.map(([, y]) => y));
  const most = Math.max(1, ...points.map(([x]) => x));
  return frame(label, id, { low: 0, high: most, name: names[0] }, { low: 0, high: top, name: names[1] }, (place) => [
    threshold === null ? null : [svg("line", { x1: LEFT, x2: place.right, y1: place.y(threshold), y2: place.y(threshold), class: "bound" }),
      svg("text", { x: place.right, y: place.y(threshold) - 4, "text-anchor": "end" }, threshold)],
    series.map(({ at, name, points: own }) => [
      svg("polyline", { class: `line c${at % 8}`, points: own.map(([x, y]) => `${place.x(x)},${place.y(y)}`).join(" ") }),
      own.length < 60 && own.map(([x, y]) => svg("circle", { class: `dot c${at % 8}`, cx: place.x(x), cy: place.y(y), r: 3 },
        svg("title", `${name}, ${names[0]} ${x}: ${+y.toPrecision(4)}`))),
      svg("text", { class: `ink c${at % 8}`, x: place.x(own.at(-1)[0]) - 4, y: place.y(own.at(-1)[1]) - 7, "text-anchor": "end" }, letter(at))])]);
}

// points: [{ at, colour, name, x, y, square, onclick }]; at: letter, and colour where there is none. reference: an x with a dashed line, or null.
export function scatter(label, id, points, names, reference = null) {
  const xs = points.map((each) => each.x), ys = points.map((each) => each.y);
  const margin = Math.max(names[2] ?? 1, 0.1 * (Math.max(...ys) - Math.min(...ys)));
  return frame(label, id, { low: 0, high: 1.05 * Math.max(reference ?? 0, ...xs), name: names[0] },
    { low: Math.min(...ys) - margin, high: Math.max(...ys) + margin, name: names[1] }, (place) => {
      const dashed = points.filter((each) => each.square).sort((one, other) => one.x - other.x);
      return [
        reference === null ? null : [svg("line", { x1: place.x(reference), x2: place.x(reference), y1: TOP, y2: place.bottom, class: "bound" }),
          svg("text", { x: place.x(reference), y: TOP - 5, "text-anchor": place.x(reference) > WIDTH / 2 ? "end" : "start" }, "time of the reference")],
        dashed.length > 1 ? svg("polyline", { class: "line dashed c0", points: dashed.map((each) => `${place.x(each.x)},${place.y(each.y)}`).join(" ") }) : null,
        points.map((each) => {
          const x = place.x(each.x), y = place.y(each.y), text = `${each.name}: ${each.y.toFixed(1)} ${names[3] ?? ""}, ${+each.x.toPrecision(3)} s`;
          const act = each.onclick && { tabindex: 0, role: "button", "aria-label": text, onclick: each.onclick,
            onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); each.onclick(); } } };
          const shape = each.square ? svg("rect", { x: x - 7, y: y - 7, width: 14, height: 14 }) : svg("circle", { cx: x, cy: y, r: 8 });
          return [svg("g", { class: `dot c${(each.colour ?? each.at) % 8}`, ...act }, shape, svg("text", { x, y: y + 3.5 }, letter(each.at)), svg("title", text))];
        })];
    }, points.some((each) => each.onclick) ? "group" : "img");
}

// Names and shares of a whole, as bars with their texts.
export const bars = (rows) => el("div.bars", rows.map(([name, share, text]) => {
  const bar = el("i");
  bar.style.width = `${Math.max(0.5, 100 * share)}%`;
  return el("div", el("span", name), el("span.bar", bar), el("span.number", text));
}));

export const shade = (share) => share === undefined ? "dn" : share === null ? "dx" : `d${Math.min(7, Math.floor(share * 8))}`;

// Layers from top to bottom, steps from left to right. rows: [{ layer, cells: [{ kind, share, text }] }]: kind and share
// together decide what is one rectangle; share null: the content decides; undefined: no call. onselect: called with the
// first and last step and layer of a part that is drawn over with a pointer. stepsText: what steps are called.
export function heatMap(label, rows, onselect, stepsText = (first, last) => first === last ? `step ${first}` : `steps ${first}-${last}`) {
  const cell = 12, width = cell * Math.max(...rows.map((row) => row.cells.length)), height = cell * rows.length;
  const runs = rows.flatMap((row, line) => {
    const found = [];
    row.cells.forEach((each, step) => {
      const last = found.at(-1);
      if (last && last.each.kind === each.kind && last.each.share === each.share) last.end = step;
      else found.push({ each, start: step, end: step });
    });
    return found.map(({ each, start, end }) => svg("rect", { x: start * cell, y: line * cell, width: (end - start + 1) * cell, height: cell, class: shade(each.share) },
      svg("title", `layer ${row.layer}, ${stepsText(start, end)}: ${each.text}`)));
  });
  const borders = [];
  for (let x = cell; x < width; x += cell) borders.push(`M${x} 0V${height}`);
  for (let y = cell; y < height; y += cell) borders.push(`M0 ${y}H${width}`);
  const drawn = svg("rect.chosen", { width: 0, height: 0 });
  const zoom = Math.max(1, Math.min(2, 500 / width));
  const map = svg("svg", { viewBox: `0 0 ${width} ${height}`, width: width * zoom, height: height * zoom, role: "img", "aria-label": label, class: onselect ? "map drawable" : "map" },
    runs, svg("path", { d: borders.join(""), class: "gaps" }), drawn);
  if (onselect) {
    let from = null;
    const place = (event) => {
      const box = map.getBoundingClientRect();
      const at = (value, most) => Math.max(0, Math.min(most - 1, Math.floor(value * most)));
      return [at((event.clientX - box.left) / box.width, width / cell), at((event.clientY - box.top) / box.height, rows.length)];
    };
    const between = (to) => [Math.min(from[0], to[0]), Math.max(from[0], to[0]), Math.min(from[1], to[1]), Math.max(from[1], to[1])];
    const draw = (event) => {
      const [left, right, top, bottom] = between(place(event));
      const box = { x: left * cell, y: top * cell, width: (right - left + 1) * cell, height: (bottom - top + 1) * cell };
      for (const [name, value] of Object.entries(box)) drawn.setAttribute(name, value);
    };
    map.addEventListener("pointerdown", (event) => { from = place(event); map.setPointerCapture(event.pointerId); draw(event); });
    map.addEventListener("pointermove", (event) => { if (from) draw(event); });
    map.addEventListener("pointerup", (event) => {
      const [left, right, top, bottom] = between(place(event));
      from = null;
      onselect([left, right], [rows[top].layer, rows[bottom].layer]);
    });
  }
  return wide(label, map);
}

// Texts of shares, as the maps show them.
export const legend = (entries) => el("ul.legend", entries.map(([text, share]) => el("li", el("i", { class: shade(share) }), text)));
