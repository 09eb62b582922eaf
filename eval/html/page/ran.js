// What ran: kernels, versions, options and notes of each model, the machine, the command line; and the calls that start the page.
function recordList(record) {
  const text = (value) => (value !== null && typeof value === "object" ? JSON.stringify(value) : String(value));
  const rows = Object.entries(record || {}).filter(([, value]) => value !== null && value !== "");
  return h(
    "dl",
    { class: "terms" },
    rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, text(value))]),
  );
}
function layerTable(groups) {
  const names = ["layers", "count", "weights", "activations", "kernel", "asked"];
  const heads = ["layers", "count", "weights", "activations", "kernel", "checkpoint asks for"].map((text) =>
    h("th", { scope: "col" }, text),
  );
  const row = (group) =>
    h(
      "tr",
      {},
      names.map((name) => h("td", { class: name === "count" ? "number" : null }, String(group[name] ?? ""))),
    );
  return h(
    "div",
    { class: "scroll" },
    h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, groups.map(row))),
  );
}
function titledList(title, texts) {
  return texts && texts.length
    ? [
        h("h4", {}, title),
        h(
          "ul",
          { class: "notes" },
          texts.map((text) => h("li", {}, String(text))),
        ),
      ]
    : [];
}
function details(each) {
  const { layers, warnings, notes, options, ...rest } = each.raw.provenance || {},
    raw = each.raw;
  return [
    raw.error ? h("p", {}, `failed: ${raw.error}`) : null,
    raw.deviations ? h("p", {}, `† ${raw.deviations}`) : null,
    raw.storage_note ? h("p", {}, `size: ${raw.storage_note}`) : null,
    titledList("Notes", [...new Set([...(raw.notes || []), ...(notes || [])])]),
    layers && layers.length
      ? [h("h4", {}, "Layers"), layerTable(layers)]
      : each.failed
        ? null
        : h("p", {}, "kernel n/a: this engine does not say what it runs"),
    Object.keys(rest).length ? [h("h4", {}, "Engine and machine"), recordList(rest)] : null,
    options ? [h("h4", {}, "Options as they ran"), recordList(options)] : null,
    h("h4", {}, "Spec"),
    h("pre", {}, JSON.stringify(raw.spec, null, 1)),
    titledList("Warnings of the engine", warnings),
  ];
}
// A command line as a shell takes it.
function commandLine(text) {
  return text ? [h("pre", { class: "command" }, text), h("div", { class: "acts" }, telling("Copy the command", () => copyText(text)))] : [];
}
// One of the runs that were merged.
function mergedPart({ file, labels, origin, reference_ppl }, i) {
  const { created, commit, versions, hardware } = origin;
  return [
    h("h3", {}, `Merged: ${file}`),
    commandLine(PAYLOAD.commands[i]),
    recordList({ rows: labels.join(", "), created, commit, "reference's PPL": reference_ppl, ...versions, ...hardware }),
  ];
}
function ranSection() {
  const models = h("div", {}),
    open = new Set();
  const entry = (each) => {
    const node = h(
      "details",
      { "data-model": each.id, open: open.has(each.id) },
      h(
        "summary",
        {},
        swatch(each.group),
        h("b", {}, each.label),
        h("span", {}, each.failed ? "failed" : `${each.raw.engine} · ${each.kernel || "kernel n/a"}`),
      ),
    );
    const fill = () => node.childElementCount > 1 || dress(node, {}, details(each));
    if (open.has(each.id)) fill();
    node.addEventListener("toggle", () => (open[node.open ? "add" : "delete"](each.id), node.open && fill()));
    return node;
  };
  byId("ran").append(
    models,
    h("div", { id: "parts" }, (RUN.parts || []).map(mergedPart)),
    h("h3", {}, RUN.parts ? "What these runs share" : "This run"),
    ...(RUN.parts ? [] : commandLine(PAYLOAD.commands[0])),
    recordList({ created: RUN.created, commit: RUN.commit }),
    h("h4", {}, "Versions"),
    recordList(RUN.versions),
    h("h4", {}, "Hardware"),
    recordList(RUN.hardware),
    h("h4", {}, "Data"),
    recordList(RUN.data),
    RUN.reference
      ? [h("h4", {}, "Reference"), recordList(RUN.reference)].reduce((all, one) => (all.append(one), all), h("div", {}))
      : "",
  );
  onChange(() => models.replaceChildren(...MODELS.filter(visible).map(entry)));
}

function theme() {
  const button = byId("theme"),
    root = document.documentElement,
    dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const say = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => ((root.dataset.theme = isDark() ? "light" : "dark"), say()));
  dark.addEventListener("change", say, { signal: SIGNAL });
  say();
}

theme();
if (TEXTS.length) textsSection();
if (!RUN.error) {
  header();
  tableSection();
  scatterSection();
  spreadSection();
  positionSection();
  differencesSection();
  confidenceSection();
  tokensSection();
  ranSection();
}
if (TEXTS.length) textSection();
selectionBar();
if (TEXTS.length) textTabs();
document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip(), { signal: SIGNAL });
document.addEventListener("scroll", moveTip, { capture: true, passive: true, signal: SIGNAL });
