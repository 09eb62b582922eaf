// The state that sections share, and helpers. Text of specs, labels and tokens enters as text nodes only.
const RUN = PAYLOAD.run;
const INSPECTION = PAYLOAD.inspection;
const NA = "n/a";
const SVG = "http://www.w3.org/2000/svg";

// Sets attributes: "on..." listens, style is an object (the content policy forbids style attributes), null values are left out.
function dress(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const h = (tag, attributes, ...children) => dress(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => dress(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

const known = (value) => typeof value === "number" && Number.isFinite(value);
const sum = (values) => values.reduce((total, each) => total + each, 0);
const estimate = (found) => ({ value: null, stderr: null, ...(found || {}) });

// A model for the sections of the page; unknown values are null.
function model(raw, id) {
  const all = raw.estimates,
    against = all && all.against,
    histogram = against && known(against.kld.value) ? against.kld_histogram : null;
  const [group, name] = PAYLOAD.names[id];
  const isReference = raw.reference && !raw.error;
  const exact = (value) => (isReference ? { value, stderr: null } : null);
  return {
    id,
    raw,
    group,
    name,
    isReference,
    against,
    failed: Boolean(raw.error),
    noiseFloor: Boolean(raw.noise_floor),
    near: PAYLOAD.near[id], // so near to the reference that KLD does not rank it: eval/results/differences.py
    label: raw.label + (raw.deviations ? " †" : "") + (raw.noise_floor ? " ≈" : ""),
    kernel: raw.kernel,
    bpw: raw.bpw_layer,
    head: raw.bpw_head,
    vram: raw.vram_gib,
    size: raw.file_bytes == null ? null : raw.file_bytes / 1e9,
    ppl: estimate(all && all.ppl),
    kld: estimate(exact(0) || (against && against.kld)),
    ratio: estimate(exact(1) || (against && against.ppl_ratio)),
    same: estimate(exact(1) || (against && against.same_top)),
    bits: estimate(all && all.rates && all.rates.bits_per_byte),
    blocks: all && all.blocks,
    curve: all && all.curve && all.curve.edges.length > 1 ? all.curve : null,
    histogram: histogram && histogram.below + histogram.above + sum(histogram.counts) > 0 ? histogram : null,
    confidence: (against && against.confidence) || [],
    percentiles: (against && against.kld_percentiles) || {},
  };
}
const MODELS = RUN.models.map(model);
const MEASURED = MODELS.filter((each) => !each.failed);
const COMPARED = MEASURED.filter((each) => each.against && known(each.kld.value));
const REFERENCE = MEASURED.find((each) => each.isReference) || null;
const FLOOR = MEASURED.filter((each) => each.noiseFloor && known(each.kld.value)).reduce(
  (most, each) => (most && most.kld.value >= each.kld.value ? most : each),
  null,
);
const GROUPS = Object.keys(PAYLOAD.styles);
const colourOf = (group) => PAYLOAD.styles[group][0] || "currentColor";

// Models that start selected: of each group the lowest KLD (else PPL) up to 6 bits a weight; four at most.
function firstChoice() {
  const value = (each) => (known(each.kld.value) ? each.kld.value : each.ppl.value);
  const candidates = MEASURED.filter((each) => !each.isReference && !each.noiseFloor && known(value(each)));
  const small = candidates.filter((each) => known(each.bpw) && each.bpw <= 6);
  const ranked = (small.length ? small : candidates.length ? candidates : MEASURED).sort((a, b) => value(a) - value(b));
  const best = ranked.filter((each, i) => ranked.findIndex((other) => other.group === each.group) === i);
  return best.slice(0, 4).map((each) => each.id);
}

const state = {
  hidden: new Set(KEPT.hidden),
  chosen: (KEPT.chosen || firstChoice()).filter((id) => MODELS[id] && !MODELS[id].failed),
  current: null,
};
state.current = state.chosen[0] ?? null;
const listeners = [];

// Calls every section's drawing again; the focus returns to the element with the same data-key.
function changed() {
  const key = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
  hideTip();
  Object.assign(KEPT, { hidden: state.hidden, chosen: state.chosen });
  for (const draw of listeners) draw();
  const again = key && document.querySelector(`[data-key="${CSS.escape(key)}"]`);
  if (again && again !== document.activeElement) again.focus({ preventScroll: true });
}
function onChange(draw) {
  listeners.push(draw);
  draw();
}
function toggleModel(id) {
  if (MODELS[id].failed) return;
  const chosen = state.chosen.includes(id);
  state.chosen = chosen ? state.chosen.filter((other) => other !== id) : [...state.chosen, id];
  state.current = chosen
    ? state.current === id
      ? (state.chosen[state.chosen.length - 1] ?? null)
      : state.current
    : id;
  changed();
}
function makeCurrent(id) {
  if (!state.chosen.includes(id)) state.chosen = [...state.chosen, id];
  state.current = id;
  changed();
}
function toggleGroup(group) {
  if (!state.hidden.delete(group)) state.hidden.add(group);
  changed();
}
const visible = (each) => !state.hidden.has(each.group);
const chosenModels = () => state.chosen.map((id) => MODELS[id]).filter(visible);

// A dash of its own for each selected model: a group's models share a colour, and in grey all groups are alike.
function dashOf(each) {
  const at = chosenModels().indexOf(each);
  return at < 0 ? "1 2" : [null, "7 3", "2 3", "9 3 2 3", "14 4"][at % 5];
}

// A label for the name of a line.
const brief = (text) => (text.length > 40 ? `${text.slice(0, 39)}…` : text);

// Numbers. Errors have two significant digits, and a value beside one as many decimals: eval/results/digits.py.
function fixed(value, digits, sign = false) {
  if (!known(value)) return NA;
  const units = value * 10 ** digits; // exact where it counts: half-way numbers go to the even digit, as in Python
  const half = Number.isInteger(value * 2 ** (digits + 1)) && Math.abs(units % 1) === 0.5;
  const text = (half ? (2 * Math.round(units / 2)) / 10 ** digits : value).toFixed(digits);
  const [whole, rest] = text.replace("-", "").split("."),
    negative = value < 0 && (sign || /[1-9]/.test(text));
  return (negative ? "−" : sign ? "+" : "") + whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? `.${rest}` : "");
}
function decimals(value, significant) {
  return value
    ? Math.min(Math.max(significant - 1 - Number(value.toExponential(significant - 1).split("e")[1]), 0), 12)
    : 0;
}
function short(value, significant = 2) {
  if (!known(value)) return NA;
  const [mantissa, power] = value.toExponential(significant - 1).split("e");
  if (value && power < -4) return `${mantissa.replace("-", "−")}e−${-power}`;
  return fixed(Number(value.toPrecision(significant)), decimals(value, significant));
}
function plusMinus({ value, stderr }, scale = 1) {
  if (!known(value)) return NA;
  if (!stderr) return short(value * scale, 4);
  const digits = decimals(stderr * scale, 2);
  return `${fixed(value * scale, digits)} ± ${fixed(Number((stderr * scale).toPrecision(2)), digits)}`;
}
const percent = (value, digits = 1) => (known(value) ? `${fixed(100 * value, digits)} %` : NA);
