// Players of several clips under one clock: play, one frame, a slider between two of them, their difference, PSNR.
import { button, el, row } from "./dom.js";
import { mark } from "./plots.js";

// clips: [{ at, colour, name, note, source, label }]; at: letter, and colour where there is none. fps, count: of all of them. The keys (space, arrows)
// are the clock's while the focus is in `scope`. The clock is null for images.
export function players(clips, fps, count, scope = document) {
  const length = count / fps, moves = count > 1;
  const media = clips.map((clip) => moves
    ? el("video", { src: clip.source, muted: true, playsinline: true, preload: "auto", "aria-label": clip.label })
    : el("img", { src: clip.source, alt: clip.label }));
  const figures = clips.map((clip, at) => el("figure", media[at], el("figcaption", mark(clip.at, clip.colour), ` ${clip.name}${clip.note ? `, ${clip.note}` : ""}`)));
  if (!moves) return { figures, media, clock: null };
  const play = button("Play", toggle);
  const seek = el("input", { type: "range", min: 0, max: count - 1, value: 0, step: 1, "aria-label": "Frame", oninput: () => { pause(); moveTo(Number(seek.value) / fps); } });
  const shown = el("output");
  const clock = el("div.clock", { role: "group", "aria-label": "Playback of all clips" }, play, seek, shown,
    el("small", "space: play, pause; arrows: one frame"));
  // One clock: `at` is where all clips are, in seconds; while playing it runs from `began`.
  let at = 0, began = 0, playing = false;
  const frameOf = (time) => Math.min(count - 1, Math.floor(time * fps + 1e-6));
  // The middle of a frame: its border belongs to either side.
  const place = (time) => (frameOf(time) + 0.5) / fps;
  function draw() {
    seek.value = frameOf(at);
    shown.textContent = `frame ${frameOf(at) + 1} of ${count}`;
    play.textContent = playing ? "Pause" : "Play";
  }
  function moveTo(time) {
    at = Math.max(0, Math.min((count - 1) / fps, time));
    began = performance.now() - 1000 * at;
    for (const video of media) show(video);
    draw();
  }
  // One seek at a time, and none before there is a frame: of seeks that overtake each other Chrome loses one in a few
  // hundred on a busy machine, and the clip then seeks without an end. `loadeddata` and `seeked` call again.
  function show(video) {
    if (video.readyState >= 2 && !video.seeking && Math.abs(video.currentTime - place(at)) > 1e-3) video.currentTime = place(at);
  }
  function start() { for (const video of media) video.play().catch(() => {}); }
  function toggle() {
    playing = !playing;
    if (playing) { moveTo(frameOf(at) >= count - 1 ? 0 : at); start(); requestAnimationFrame(tick); }
    else { for (const video of media) { video.pause(); video.playbackRate = 1; } moveTo(frameOf(at) / fps); }
    draw();
  }
  function pause() { if (playing) toggle(); }
  function tick(now) {
    if (!playing) return;
    if (!media[0].isConnected) { pause(); return; }
    at = (now - began) / 1000;
    if (at >= length) { moveTo(0); start(); }
    at = Math.max(0, at);
    // A clip that runs ahead or behind changes its rate, by at most a fifth; one that is far off is put in its place.
    for (const video of media) {
      const ahead = video.currentTime - at;
      if (video.seeking || video.readyState < 2) continue;
      if (Math.abs(ahead) > 0.5) video.currentTime = place(at);
      const rate = Math.abs(ahead) < 0.25 / fps ? 1 : Math.max(0.8, Math.min(1.2, 1 - 2 * ahead));
      if (Math.abs(video.playbackRate - rate) > 0.01) video.playbackRate = rate;
    }
    draw();
    requestAnimationFrame(tick);
  }
  const keys = (event) => {
    if (!media[0].isConnected) { document.removeEventListener("keydown", keys); return; }
    if (event.altKey || event.ctrlKey || event.metaKey || !scope.contains(event.target)) return;
    const inside = event.target.closest?.("button, a, select, textarea, summary, input:not([type=range])");
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (inside || (event.target.type === "range" && event.target !== seek)) return;
    if (event.key === " ") { event.preventDefault(); toggle(); }
    else if (step) { event.preventDefault(); pause(); moveTo((frameOf(at) + step) / fps); }
  };
  document.addEventListener("keydown", keys);
  for (const video of media) {
    for (const name of ["loadeddata", "seeked"]) video.addEventListener(name, () => { if (!playing) show(video); });
  }
  draw();
  return { figures, media, clock };
}

const sizeOf = (each) => [each.videoWidth || each.naturalWidth, each.videoHeight || each.naturalHeight];

// Two clips on top of each other: a slider between them, or their difference four times as strong.
export function overlay(media, clips) {
  const canvas = el("canvas", { role: "img", "aria-label": "The two clips on top of each other" });
  const pick = (chosen, label) => el("select", { "aria-label": label }, clips.map((clip, at) => el("option", { value: at, selected: at === chosen }, clip.name)));
  const left = pick(0, "Left"), right = pick(Math.min(1, clips.length - 1), "Right");
  const way = el("select", { "aria-label": "How they are laid over each other" }, el("option", { value: "slider" }, "slider"), el("option", { value: "difference" }, "difference x 4"));
  const split = el("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": "Where the left clip ends, in percent" });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const spare = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  function draw() {
    if (!canvas.isConnected && canvas.width > 300) return;
    const [one, other] = [media[left.value], media[right.value]], [width, height] = sizeOf(one);
    if (width && sizeOf(other)[0]) {
      if (canvas.width !== width || canvas.height !== height) { canvas.width = spare.canvas.width = width; canvas.height = spare.canvas.height = height; }
      context.drawImage(other, 0, 0, width, height);
      if (way.value === "slider") {
        const edge = Math.round(width * split.value / 100);
        if (edge) context.drawImage(one, 0, 0, edge * sizeOf(one)[0] / width, sizeOf(one)[1], 0, 0, edge, height);
        context.fillStyle = "#fff";
        context.fillRect(edge - 0.5, 0, 1, height);
      } else {
        spare.drawImage(one, 0, 0, width, height);
        const a = spare.getImageData(0, 0, width, height).data, mixed = context.getImageData(0, 0, width, height), b = mixed.data;
        for (let at = 0; at < b.length; at += 4) for (let c = 0; c < 3; c++) b[at + c] = Math.min(255, 4 * Math.abs(a[at + c] - b[at + c]));
        context.putImageData(mixed, 0, 0);
      }
    }
    requestAnimationFrame(draw);
  }
  requestAnimationFrame(draw);
  return el("div.overlay", row(left, right, way, split), canvas);
}

// The likeness of one file to another, from pixels as this browser decodes them, which are opened anew: PSNR in dB, at
// most 100; SSIM, the mean over blocks of 8 x 8 pixels of luminance; the mean difference of values from 0 to 255.
export async function likeness(source, reference, fps, count, signal) {
  const opened = await Promise.all([source, reference].map((each) => open(each, count > 1)));
  const [width, height] = sizeOf(opened[1]);
  const read = opened.map(() => Object.assign(document.createElement("canvas"), { width, height }).getContext("2d", { willReadFrequently: true }));
  let squares = 0, apart = 0, alike = 0;
  for (let index = 0; index < count; index++) {
    if (signal?.aborted) return null;
    const [one, other] = await Promise.all(opened.map(async (each, at) => {
      if (count > 1) await seekTo(each, (index + 0.5) / fps, fps);
      read[at].drawImage(each, 0, 0, width, height);
      return read[at].getImageData(0, 0, width, height).data;
    }));
    for (let at = 0; at < one.length; at++) if (at % 4 < 3) { const error = one[at] - other[at]; squares += error ** 2; apart += Math.abs(error); }
    alike += ssim(one, other, width, height);
  }
  const values = 3 * width * height * count;
  return { psnr_db: squares ? Math.min(100, 10 * Math.log10(255 ** 2 * values / squares)) : 100, ssim: alike / count, difference: apart / values };
}

function ssim(one, other, width, height) {
  const light = (data, at) => 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2];
  let sum = 0, blocks = 0;
  for (let top = 0; top + 8 <= height; top += 8) for (let left = 0; left + 8 <= width; left += 8) {
    let x = 0, y = 0, xx = 0, yy = 0, xy = 0;
    for (let at = 0; at < 64; at++) {
      const place = 4 * ((top + (at >> 3)) * width + left + (at & 7)), a = light(one, place), b = light(other, place);
      x += a / 64; y += b / 64; xx += a * a / 64; yy += b * b / 64; xy += a * b / 64;
    }
    // The constants are (0.01 x 255) ** 2 and (0.03 x 255) ** 2.
    sum += (2 * x * y + 6.5025) * (2 * (xy - x * y) + 58.5225) / ((x * x + y * y + 6.5025) * (xx - x * x + yy - y * y + 58.5225));
    blocks++;
  }
  return sum / blocks;
}

function open(source, moves) {
  return new Promise((done, failed) => {
    const each = moves ? el("video", { muted: true, preload: "auto" }) : el("img");
    each.addEventListener(moves ? "loadeddata" : "load", () => done(each), { once: true });
    each.addEventListener("error", () => failed(new Error("a clip cannot be read")), { once: true });
    each.src = source;
  });
}

// `seeked` may come while an earlier frame is still shown: a frame says itself which it is. Where none comes, as of the
// frame that is shown already, `seeked` is all there is.
function seekTo(video, time, fps) {
  return new Promise((done) => {
    const late = () => setTimeout(done, 1000);
    const shown = (_, { mediaTime }) => Math.abs(mediaTime - time) < 0.75 / fps ? done() : video.requestVideoFrameCallback?.(shown);
    video.requestVideoFrameCallback?.(shown);
    video.addEventListener("seeked", late, { once: true });
    video.currentTime = time;
  });
}
