// A report of several texts: the table of all texts, their drawing, and the tabs that choose the text of all below.
const OVERVIEW = WHOLE.overview;
const GOOD_TEXTS = TEXTS.filter((text) => !text.error);

// The columns of numbers: {key, group, name, field, digits, times, of: number of a model -> {value, stderr, failure,
// exact}}; what is shown is times * value.
function meanColumn([key, name, digits]) {
  const found = (i) => RESULTS.means[i],
    every = (i) => GOOD_TEXTS.every((text) => text.models[i].reference && !text.models[i].error);
  return {
    key: `mean-${key}`,
    group: "mean of the texts",
    name,
    field: `mean_${key}`,
    digits,
    times: 1,
    of: (i) => ({
      value: found(i)[`mean_${key}`],
      stderr: found(i)[`mean_${key}_stderr`],
      exact: key === "kld" && known(found(i).mean_kld) && every(i),
    }),
  };
}
function textColumn(text, t, { name: key, title, digits, times, exact }) {
  const of = (i) => {
    const raw = text.error ? text : text.models[i];
    if (raw.error) return { value: null, stderr: null, failure: raw.error };
    return { value: raw[key], stderr: raw[`${key}_stderr`], exact: exact !== null && raw.reference };
  };
  return { key: `${t}-${key}`, group: text.name, name: title, field: `${text.name} ${key}`, digits, times, of };
}
function textColumns() {
  const measures = [
    ["kld", "KLD", 5],
    ["ppl", "PPL", 4],
  ];
  const drawn = OVERVIEW.drawings.map((each) => each.key),
    wanted = measures.filter(([key]) => drawn.includes(key)),
    has = (text, key) => text.error || text.models.some((raw) => known(raw[key])),
    named = (name) => WHOLE.shared.columns.find((each) => each.name === name),
    columns = (text, t) => OVERVIEW.columns[t].map(named).filter(({ name }) => has(text, name));
  const means = wanted.filter(([key]) => RESULTS.means.some((each) => known(each[`mean_${key}`])));
  return [
    ...means.map(meanColumn),
    ...TEXTS.flatMap((text, t) => columns(text, t).map((each) => textColumn(text, t, each))),
  ];
}
// What a cell says: its number, its error, and why there is none.
function textCell(column, i) {
  const { value, stderr, failure, exact } = column.of(i);
  if (exact) return ["ref", "", null];
  const shown = known(value) ? column.times * value : null;
  return [fixed(shown, column.digits), known(value) && known(stderr) ? `± ${short(column.times * stderr)}` : "", failure];
}
function overviewModel({ label, noise_floor: floor }, i) {
  const found = GOOD_TEXTS.map((text) => text.models[i]),
    sized = found.find((raw) => known(raw.bpw_layer)) || found.find((raw) => known(raw.file_bytes)) || found[0];
  const { bpw_layer: bpw, file_bytes: bytes } = sized,
    files = known(bytes) ? `${fixed(bytes / 1e9, 2)} GB` : NA;
  const marks = (found.some((raw) => raw.deviations) ? " †" : "") + (floor ? " ≈" : "");
  return { i, raw: label, label: label + marks, bpw, bytes, size: known(bpw) ? `${fixed(bpw, 2)} bpw` : files };
}
function sortedOverview(rows, columns) {
  const column = columns.find((each) => each.key === KEPT.sort),
    down = KEPT.down ? -1 : 1;
  if (KEPT.sort === "label") return [...rows].sort((a, b) => down * a.label.localeCompare(b.label, "en", { numeric: true }));
  if (!column && KEPT.sort !== "size") return rows;
  const value = (row) => (column ? column.of(row.i).value : row.bpw);
  return [...rows].sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    return known(one) && known(other) ? down * (one - other) : known(other) - known(one);
  });
}

function overviewHeading(key, name, attributes, again) {
  const at = KEPT.sort === key,
    sort = () => (Object.assign(KEPT, { down: at && !KEPT.down, sort: key }), again());
  const arrow = at ? h("span", { class: "arrow", "aria-hidden": "true" }, KEPT.down ? "▼" : "▲") : null,
    order = at ? (KEPT.down ? "descending" : "ascending") : "none";
  const button = h("button", { type: "button", "data-key": `texts-${key}`, onclick: sort }, name, arrow);
  return h("th", { scope: "col", "aria-sort": order, "data-column": key, ...attributes }, button);
}
function overviewRow(row, columns, isFirst) {
  const cell = (column) => {
    const [text, error, failure] = textCell(column, row.i),
      look = { class: isFirst(column) ? "number first" : "number", "data-cell": column.key, title: failure };
    return h("td", look, text, error ? h("small", { class: "error" }, error) : null);
  };
  const label = h("span", { class: "label" }, h("span", {}, row.label, phone.matches ? h("small", {}, row.size) : null)),
    size = phone.matches ? null : h("td", { class: "number" }, row.size);
  return h("tr", {}, h("th", { scope: "row" }, label), size, columns.map(cell));
}
function overviewTable(rows, columns, again) {
  const groups = [...new Set(columns.map((each) => each.group))],
    members = (group) => columns.filter((each) => each.group === group),
    isFirst = (column) => members(column.group)[0] === column;
  const group = (name) =>
    h("th", { scope: "colgroup", class: "group-name", colspan: members(name).length }, h("span", { title: name }, name));
  const name = (each) => overviewHeading(each.key, each.name, { class: isFirst(each) ? "number first" : "number" }, again);
  const top = [
    overviewHeading("label", "model", { rowspan: 2 }, again),
    phone.matches ? null : overviewHeading("size", "size", { rowspan: 2, class: "number" }, again),
  ];
  const head = h("thead", {}, h("tr", {}, top, groups.map(group)), h("tr", {}, columns.map(name)));
  return h("table", {}, head, h("tbody", {}, rows.map((row) => overviewRow(row, columns, isFirst))));
}

// The table as text, in the order in which it is shown.
const escapedMarkdown = (text) => text.replace(/\s+/g, " ").replace(/[\\`*_{}[\]<>#|~^&]/g, "\\$&");
function overviewMarkdown(rows, columns) {
  const line = (cells) => `| ${cells.map(escapedMarkdown).join(" | ")} |`,
    words = (row) => columns.map((column) => textCell(column, row.i).slice(0, 2).join(" ").trim());
  return [
    line(["model", "size", ...columns.map((each) => `${each.group}: ${each.name}`)]),
    `| ${[":--", "--:", ...columns.map(() => "--:")].join(" | ")} |`,
    ...rows.map((row) => line([row.label, row.size, ...words(row)])),
    "",
    ...overviewNotes().map((note) => `- ${escapedMarkdown(note)}`),
    "",
  ].join("\n");
}
function overviewCsv(rows, columns) {
  const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replace(/"/g, '""')}"` : value),
    plain = (value) => (/^[=+\-@\t\r＝＋－＠]/.test(value) && typeof value === "string" ? `'${value}` : value), // no formula
    line = (cells) => `${cells.map((each) => quoted(String(plain(each) ?? ""))).join(",")}\r\n`,
    numbers = ({ value, stderr }) => [value, stderr];
  const names = columns.flatMap(({ field }) => [field, `${field}_stderr`]);
  const values = (row) => [row.raw, row.bpw, row.bytes, ...columns.flatMap((column) => numbers(column.of(row.i)))];
  return [["label", "bpw_layer", "file_bytes", ...names], ...rows.map(values)].map(line).join("");
}
// What the report says of the texts, each text that failed, and each model that failed, once if it always did.
function overviewNotes() {
  const failed = TEXTS.filter((text) => text.error).map((text) => `${text.name} failed: ${text.error}`);
  GOOD_TEXTS[0].models.forEach(({ label }, i) => {
    const errors = GOOD_TEXTS.map((text) => [text.name, text.models[i].error]).filter(([, error]) => error),
      reasons = new Set(errors.map(([, error]) => error));
    if (errors.length === GOOD_TEXTS.length && reasons.size === 1) failed.push(`${label} failed: ${errors[0][1]}`);
    else failed.push(...errors.map(([name, error]) => `${label} on ${name} failed: ${error}`));
  });
  return [...OVERVIEW.notes, ...failed];
}
function overviewPart(section) {
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of all texts" }),
    columns = textColumns(),
    rows = GOOD_TEXTS[0].models.map(overviewModel),
    copy = (words) => () => copyText(words(sortedOverview(rows, columns), columns));
  const fill = () => {
    const key = document.activeElement && document.activeElement.dataset.key,
      left = scroll.scrollLeft;
    scroll.replaceChildren(overviewTable(sortedOverview(rows, columns), columns, fill));
    scroll.scrollLeft = left;
    const again = key && scroll.querySelector(`[data-key="${CSS.escape(key)}"]`);
    if (again) again.focus({ preventScroll: true });
  };
  const buttons = [
    telling("Copy as Markdown", copy(overviewMarkdown), "copy-texts-markdown"),
    telling("Copy as CSV", copy(overviewCsv), "copy-texts-csv"),
  ];
  const notes = overviewNotes().map((note) => h("li", {}, note));
  section.append(scroll, h("div", { class: "acts" }, buttons), h("ul", { class: "notes" }, notes));
  phone.addEventListener("change", fill, { signal: SIGNAL });
  fill();
}
const chosenDrawing = () => OVERVIEW.drawings.find((each) => each.key === KEPT.drawing) || OVERVIEW.drawings[0];
function drawingPart(section) {
  const place = h("div", { class: "chart" }),
    again = drawn(place, (width) => dumbbellDrawing(width, chosenDrawing())),
    options = OVERVIEW.drawings.map((each) => [each.key, each.name]),
    pick = (key) => ((KEPT.drawing = key), again());
  const controls = options.length > 1 ? choice("values", options, chosenDrawing().key, pick) : null,
    save = saveButtons(place, "All texts", legendOf(place), () => chosenDrawing().title);
  section.append(h("div", { class: "controls" }, controls), place, save);
  again();
}
function textsSection() {
  byId("texts").hidden = false;
  overviewPart(byId("texts"));
  if (OVERVIEW.drawings.length) drawingPart(byId("texts"));
}

// The heading of the chosen text, above what a report of this text alone shows; of a text that failed, why.
function textSection() {
  const section = byId("about-text"),
    { name, error } = TEXTS[KEPT.text];
  section.hidden = false;
  section.dataset.short = "Text";
  section.append(h("h2", {}, name), byId("subtitle"), byId("about"), byId("meaning"));
  if (!error) return;
  section.append(h("p", { class: "failure" }, `This text failed: ${error}`));
  for (const each of document.querySelectorAll("main > section")) each.hidden = each !== section;
}
function textTabs() {
  const pick = (i) => () => {
    KEPT.focus = true;
    location.hash = hashOf(i); // start.js listens to it
  };
  const attributes = { type: "button", role: "tab", "aria-controls": "about-text" };
  const tabs = TEXTS.map(({ name, error }, i) => {
    const own = { "aria-selected": String(i === KEPT.text), title: name, class: error ? "failed" : null, onclick: pick(i) };
    return h("button", { ...attributes, ...own }, error ? `${name} (failed)` : name);
  });
  byId("tabs").append(...tabs);
  roving(byId("tabs"), tabs, 1);
  tabs.forEach((tab, i) => tab.setAttribute("tabindex", i === KEPT.text ? "0" : "-1"));
  byId("tabs").scrollLeft = tabs[KEPT.text].offsetLeft - byId("tabs").offsetLeft - 40; // where all do not fit
  if (KEPT.focus) tabs[KEPT.text].focus({ preventScroll: true });
  KEPT.focus = false;
}
