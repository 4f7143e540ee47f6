// The request that is being written, which all views share: kept in this tab, sent by Make, explained by Attention.
const STORE = "diffusion-runtime draft";
export const EMPTY = { prompt: "", values: {}, preset: "", attention: null, seed: "", count: 1 };
// Fields of a recipe's request that are no values of a form.
const APART = new Set(["prompt", "seed"]);

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

// The settings of a recipe, of a file that this program wrote.
export function fromRecipe(recipe) {
  const values = Object.fromEntries(Object.entries(recipe.request ?? {})
    .filter(([name, value]) => value != null && !APART.has(name) && !name.endsWith("_path") && !(Array.isArray(value) && !value.length)));
  const { lora = [], attention_override: override, attention } = recipe.runtime ?? {};
  const own = lora.filter((each) => model.card.loras.includes(each.path)).map((each) => ({ name: each.path, scale: each.scale }));
  return { ...EMPTY, prompt: recipe.request?.prompt ?? "", seed: String(recipe.request?.seed ?? ""), values: unusual({ ...values, ...(own.length ? { lora: own } : {}) }), attention: override ?? attention ?? null };
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
      if (found.schema === MARK) return found;
      if (found.recipe?.schema === MARK) return found.recipe;
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
