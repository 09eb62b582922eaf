// Header and table.
// Numbers that a tooltip leaves to the table; it has three percentiles beside the KLD.
const QUIET = ["kld_median", "kld_p99", "kld_max", "top1", "entropy", "non_finite", "load", "seconds"];
function modelRows(each) {
  const p = each.percentiles,
    spread = known(p["50"]) ? ` (median ${short(p["50"])}, p99 ${short(p["99"])}, max ${short(p.max)})` : "";
  const rows = [
    ["engine", each.raw.engine],
    ["kernel", each.kernel || NA],
  ];
  for (const column of EVERY.filter((one) => one.value && !QUIET.includes(one.key) && known(one.value(each)))) {
    const error = column.error && column.error(each),
      text = numberText(column, each);
    rows.push([
      column.name,
      text + (known(error) && text !== "ref" ? ` ± ${short(error)}` : "") + (column.key === "kld" ? spread : ""),
    ]);
  }
  if (each.raw.non_finite) rows.push(["non-finite", fixed(each.raw.non_finite, 0)]);
  if (each.raw.kv_cache) rows.push(["KV cache", each.raw.kv_cache]);
  if (each.raw.beside) rows.push(["‡ beside", each.raw.beside]);
  if (each.noiseFloor) rows.push(["", "a noise floor"]);
  if (each.raw.deviations) rows.push(["†", each.raw.deviations]);
  for (const note of each.raw.notes || []) rows.push(["", note]);
  return rows;
}

function header() {
  const data = RUN.data || {},
    spec = data.spec || {},
    rows = [];
  byId("subtitle").textContent = RUN.subtitle;
  const add = (name, value) =>
    value !== null &&
    value !== undefined &&
    value !== "" &&
    rows.push(h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  add("Data", spec.path || spec.dataset);
  add("Method", data.method);
  if (known(data.windows)) add("Windows", `${fixed(data.windows, 0)} × ${fixed(data.window_length, 0)} tokens`);
  if (known(data.scored_tokens)) add("Scored tokens", fixed(data.scored_tokens, 0));
  add("Reference", RUN.reference && RUN.reference.label);
  add("Noise floor", FLOOR && FLOOR.label);
  add("Date", (RUN.created || "").slice(0, 10));
  if (INSPECTION && INSPECTION.passages.length) add("Contains", "excerpts of the text");
  byId("about").append(...rows);
  byId("meaning").textContent = MEASURED.some((each) => known(each.ppl.stderr))
    ? "± is one standard error, from disjoint blocks of the text. The error of PPL says how far PPL would move on another text of this " +
      "kind. All models would move together: differences between models are far more certain, and have their own, paired errors below."
    : "";
}

// The columns of eval/table/registry.py, with their values in a model: words by text, numbers by value and error.
function column(each) {
  const raw = (m) => (each.exact !== null && m.isReference ? each.exact : m.raw[each.field]),
    { times, plus } = each;
  const shared = { key: each.name, name: each.title, title: each.means };
  if (each.name === "label") return { ...shared, text: (m) => m.label };
  if (each.digits === null) return { ...shared, text: (m) => (m.failed ? null : m.raw[each.field]) };
  return {
    ...shared,
    value: (m) => (known(raw(m)) ? times * raw(m) + plus : null),
    error: each.error && ((m) => (known(m.raw[`${each.field}_stderr`]) ? times * m.raw[`${each.field}_stderr`] : null)),
    digits: each.digits,
    sign: each.signed,
    best: each.best,
    compared: each.exact !== null,
    mark: (m) => (each.name === "speed" && m.raw.beside ? "‡" : ""),
  };
}
const EVERY = PAYLOAD.columns.map(column);
const COLUMNS = PAYLOAD.shown.map((name) => EVERY.find((each) => each.key === name));
const FAILED_IN = COLUMNS.find((each) => each.key === "ppl") || COLUMNS.find((each) => each.value);
const sorting = { key: null, down: false };
// Where the table does not fit, the numbers that are compared come first, and words last; errors stand below on a phone.
const narrow = matchMedia("(max-width: 70rem)");
const phone = matchMedia("(max-width: 40rem)");
const FIRST = ["label", "bpw_layer", "kld", "ppl", "same_top", "ratio", "kld_p99.9", "size", "vram_gib"];
function shownColumns() {
  const place = (column) => (FIRST.includes(column.key) ? FIRST.indexOf(column.key) : column.text ? 99 : 50);
  return narrow.matches && !PAYLOAD.chosen ? [...COLUMNS].sort((a, b) => place(a) - place(b)) : COLUMNS;
}

function sorted(models) {
  const column = COLUMNS.find((each) => each.key === sorting.key);
  if (!column) return models;
  const value = (each) => (column.text ? column.text(each) : each.failed ? null : column.value(each)) ?? null;
  const order = (a, b) => (column.text ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  return [...models].sort((a, b) => {
    const one = value(a),
      other = value(b);
    if (one === null || other === null) return (one === null) - (other === null);
    return sorting.down ? order(other, one) : order(one, other);
  });
}

function heading(column) {
  const at = sorting.key === column.key;
  const sort = () => {
    sorting.down = at && !sorting.down;
    sorting.key = column.key;
    changed();
  };
  const arrow = at ? h("span", { class: "arrow", "aria-hidden": "true" }, sorting.down ? "▼" : "▲") : null;
  const cell = h(
    "th",
    {
      scope: "col",
      class: column.text ? null : "number",
      title: column.title,
      "aria-sort": at ? (sorting.down ? "descending" : "ascending") : "none",
      "data-column": column.key,
    },
    h("button", { type: "button", "data-key": `sort-${column.key}`, onclick: sort }, column.name, arrow),
  );
  return column.error && !phone.matches ? [cell, h("td", { class: "error" })] : cell;
}

const numberText = (column, each) =>
  column.compared && each.isReference
    ? "ref"
    : fixed(column.value(each), column.digits, column.sign) + column.mark(each);
function numberCells(column, each) {
  const value = column.value(each),
    same = { "data-cell": column.key, class: "number" };
  if (each.failed) return [h("td", { ...same, colspan: column.error && !phone.matches ? 2 : 1 }, column === FAILED_IN ? "failed" : "")];
  const marked = column.best && PAYLOAD.best[column.best][each.id], // eval/results/differences.py
    error = column.error && column.error(each),
    said = known(error) && known(value) ? `± ${short(error)}` : "";
  const cells = [
    h(
      "td",
      { ...same, title: marked ? "the best quantized model of its column, or not told apart from it" : null },
      marked ? h("span", { class: "best" }, "★") : null,
      numberText(column, each),
      phone.matches && said ? h("small", { class: "error" }, said) : null, // where there is no room beside the number
    ),
  ];
  if (column.error && !phone.matches) cells.push(h("td", { class: "error" }, said));
  return cells;
}

function tableRow(each) {
  const chosen = state.chosen.includes(each.id);
  const box = h("input", {
    type: "checkbox",
    checked: chosen,
    disabled: each.failed,
    "data-key": `row-${each.id}`,
    "aria-label": `select ${each.label}`,
    onchange: () => toggleModel(each.id),
    onclick: (event) => event.stopPropagation(),
  });
  const label = h(
    "th",
    { scope: "row", title: each.raw.error || null },
    h("span", { class: "label" }, box, swatch(each.group), h("span", {}, each.label)),
  );
  const cells = shownColumns().slice(1).map((column) =>
    column.text
      ? h(
          "td",
          { "data-cell": column.key, class: "name", title: column.text(each) },
          each.failed ? "" : column.text(each) || NA,
        )
      : numberCells(column, each),
  );
  const names = [chosen && "chosen", each.isReference && "reference", each.failed && "failed"].filter(Boolean).join(" ");
  return h("tr", { class: names || null, "data-model": each.id, onclick: () => toggleModel(each.id) }, label, cells);
}

function tableSection() {
  const buttons = h("div", {}),
    scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of models" });
  byId("table").append(
    h("p", { class: "hint" }, "A column's name sorts by it; a row selects its model for the sections below."),
    buttons,
    scroll,
    h(
      "div",
      { class: "acts" },
      telling("Copy as Markdown", () => copyText(markdownText(sorted(MODELS.filter(visible)))), "copy-markdown"),
      telling("Copy as CSV", () => copyText(csvText(sorted(MODELS.filter(visible)))), "copy-csv"),
    ),
    h(
      "ul",
      { class: "notes" },
      PAYLOAD.footnotes.map((note) => h("li", {}, note)),
    ),
  );
  for (const width of [narrow, phone]) width.addEventListener("change", changed, { signal: SIGNAL });
  onChange(() => {
    const models = sorted(MODELS.filter(visible));
    buttons.replaceChildren(groupButtons("table"));
    const left = scroll.scrollLeft;
    scroll.replaceChildren(
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, shownColumns().map(heading))),
        h(
          "tbody",
          {},
          models.map(tableRow),
        ),
      ),
    );
    scroll.scrollLeft = left;
  });
}
