// The request that is being written, which all views share: kept in this tab, sent by Make, explained by Attention.
const STORE = "diffusion-runtime draft";
export const EMPTY = { prompt: "", values: {}, preset: "", attention: null, seed: "", count: 1 };
export const model = { card: null, fields: {} };
export let draft = { ...EMPTY, ...JSON.parse(sessionStorage.getItem(STORE) ?? "{}") };

export function save(changes = {}) {
  Object.assign(draft, changes);
  sessionStorage.setItem(STORE, JSON.stringify(draft));
}

// The value that a field has: the user's, the preset's, the model's.
export const preset = (name = draft.preset) => ({ ...model.card.defaults, ...(model.card.presets[name] ?? {}) });
export const valueOf = (name) => draft.values[name] ?? preset()[name];
export const isImage = () => (valueOf("num_frames") ?? 1) === 1;

// A value that is the preset's own is not sent.
export function set(name, value) {
  const { [name]: _, ...others } = draft.values;
  save({ values: value === "" || value == null || value === preset()[name] ? others : { ...others, [name]: value } });
}

// What is sent of a draft, without its seed.
export function fieldsOf(given, isVideo) {
  const { fps, num_frames: frames, ...values } = given.values;
  const length = isVideo ? { ...(fps == null ? {} : { fps }), ...(frames == null ? {} : { num_frames: frames }) } : {};
  return { prompt: given.prompt, ...values, ...length, ...(given.preset ? { preset: given.preset } : {}),
    ...(given.attention ? { attention: given.attention } : {}) };
}

export const fields = () => fieldsOf(draft, !isImage());

// What /v1/explain is asked; an image is a video of one frame there.
export const explained = ({ prompt, ...rest } = fields()) => ({ ...rest, ...(isImage() ? { num_frames: 1 } : {}) });

// Values that are not the model's own.
const unusual = (values) => Object.fromEntries(Object.entries(values).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(model.card.defaults[name])));

// The settings of a job, of this server.
export function fromJob(job) {
  const { values, attention, lora } = job.settings;
  return { ...EMPTY, prompt: job.prompt, seed: String(job.seed), values: unusual({ ...values, ...(lora?.length ? { lora } : {}) }), attention };
}

const isMap = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isSpec = (each) => typeof each === "string" || isMap(each) && typeof (each.backend ?? each.name ?? "") === "string" && isMap(each.extra ?? each.options ?? {});
const isChoice = (given) => isSpec(given) && (typeof given === "string" || isMap(given.per_role ?? {}) && Object.values(given.per_role ?? {}).every(isSpec)
  && Array.isArray(given.schedule ?? []) && (given.schedule ?? []).every((rule) => isMap(rule) && isSpec(rule)) && isSpec(given.default ?? ""));
const isLike = (value, usual) => (usual == null || typeof value === typeof usual) && (typeof value !== "number" || isFinite(value));
// Fields of a recipe that have no value, or are no values of the form.
const isApart = ([name, value]) => value == null || value.length === 0 && name !== "negative_prompt" || /^(prompt|seed|model|size|preset|attention|stream|references|(input|return)_.*|.*_path)$/.test(name);

// The settings of a recipe, and the names of what is left out. The file may be a stranger's: no name that requests do not
// have, and no value of another type than the model's own.
export function fromRecipe(recipe) {
  const { request } = recipe, { lora, attention_override: override, attention } = isMap(recipe.runtime) ? recipe.runtime : {};
  const chosen = override ?? attention, left = chosen && !isChoice(chosen) ? ["attention"] : [], { defaults, loras } = model.card;
  const values = Object.entries(request).filter((each) => !isApart(each)).filter(([name, value]) => {
    const isTaken = (Object.hasOwn(model.fields, name) || Object.hasOwn(defaults, name)) && isLike(value, defaults[name]);
    if (!isTaken) left.push(name);
    return isTaken;
  });
  const own = (Array.isArray(lora) ? lora : []).filter((each) => loras.includes(each?.path)).map((each) => ({ name: each.path, scale: each.scale }));
  return { left, settings: { ...EMPTY, prompt: isLike(request.prompt, "") ? request.prompt ?? "" : "", seed: Number.isSafeInteger(request.seed) ? String(request.seed) : "",
    values: unusual({ ...Object.fromEntries(values), ...(own.length ? { lora: own } : {}) }), attention: left.includes("attention") ? null : chosen ?? null } };
}

const MARK = "diffusion_runtime.recipe/1";
const MOST = 64 * 2 ** 20;

// The recipe in a file of ours (mp4, PNG, WebP, GIF, or a sidecar): the JSON object around its schema. null for others.
export async function recipeIn(file) {
  if (file.size > MOST) return null;
  const text = new TextDecoder("latin1").decode(await file.arrayBuffer());
  const place = text.indexOf(MARK);
  for (let start = place, tries = 0; place >= 0 && tries < 4 && (start = text.lastIndexOf("{", start - 1)) >= 0; tries++) {
    try {
      const found = JSON.parse(text.slice(start, endOf(text, start)));
      for (const each of [found, found.recipe]) if (each?.schema === MARK && isMap(each.request)) return each;
    } catch {
      // A brace inside of a text.
    }
  }
  return null;
}

function endOf(text, start) {
  for (let at = start, depth = 0, inText = false; at < text.length && at < start + 200_000; at++) {
    const each = text[at];
    if (inText) { if (each === "\\") at++; else if (each === '"') inText = false; }
    else if (each === '"') inText = true;
    else if (each === "{") depth++;
    else if (each === "}" && --depth === 0) return at + 1;
  }
  return start;
}
