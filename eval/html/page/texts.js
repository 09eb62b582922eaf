// A report of several texts: the table of all texts, their drawing, and the tabs that choose the text of all below.
const OVERVIEW = WHOLE.overview;
const SHOWN_TEXT = TEXTS[KEPT.text];
const sizeOf = (raw) => (known(raw.layer_bpw) ? `${fixed(raw.layer_bpw, 2)} bpw` : known(raw.file_bytes) ? `${fixed(raw.file_bytes / 1e9, 2)} GB` : NA);

// The columns of numbers of the table of all texts: {key, group, name, field, digits, of: model's number -> [value, error, failure]}.
function textColumns() {
  const measures = [
    ["kld", "KLD", 5],
    ["ppl", "PPL", 4],
  ].filter(([key]) => key === "ppl" || OVERVIEW.drawings.some((each) => each.key === "kld"));
  const means = measures.map(([key, name, digits]) => ({
    key: `mean-${key}`,
    group: "mean of the texts",
    name,
    field: `mean_${key}`,
    digits,
    of: (i) => [WHOLE.texts.means[i][`mean_${key}`], WHOLE.texts.means[i][`mean_${key}_stderr`], null],
  }));
  const column = (text, t, [key, name, digits]) => ({
    key: `${t}-${key}`,
    group: text.name,
    name,
    field: `${text.name} ${key}`,
    digits,
    of: (i) => {
      const raw = text.error ? {} : text.models[i];
      if (text.error || raw.error) return [null, null, text.error || raw.error];
      return [raw[key], raw[`${key}_stderr`], null];
    },
    exact: (i) => key === "kld" && !text.error && text.models[i].reference && !text.models[i].error,
  });
  const has = (text, key) => text.error || text.models.some((raw) => known(raw[key]));
  return [...means, ...TEXTS.flatMap((text, t) => measures.filter(([key]) => has(text, key)).map((each) => column(text, t, each)))];
}
const isReferenceEverywhere = (i) => {
  const found = TEXTS.filter((text) => !text.error).map((text) => text.models[i]);
  return found.every((raw) => raw.reference && !raw.error);
};
// What a cell says: its number, its error, and why there is none.
function textCell(column, i) {
  const [value, stderr, failure] = column.of(i);
  if (column.exact ? column.exact(i) : column.key === "mean-kld" && known(value) && isReferenceEverywhere(i)) return ["ref", "", null];
  if (failure) return [column.name === "PPL" ? "failed" : NA, "", failure];
  return [fixed(value, column.digits), known(value) && known(stderr) ? `± ${short(stderr)}` : "", null];
}
function overviewModels() {
  const any = TEXTS.find((text) => !text.error);
  return any.models.map((raw, i) => {
    const found = TEXTS.filter((text) => !text.error).map((text) => text.models[i]);
    const sized = found.find((each) => known(each.layer_bpw) || known(each.file_bytes)) || raw;
    const marks = (found.some((each) => each.deviations) ? " †" : "") + (raw.noise_floor ? " ≈" : "");
    return { i, label: raw.label + marks, size: sizeOf(sized), bpw: sized.layer_bpw, bytes: sized.file_bytes };
  });
}
function sortedOverview(rows, columns) {
  const column = columns.find((each) => each.key === KEPT.sort),
    names = { label: (a, b) => a.label.localeCompare(b.label, "en", { numeric: true }), size: (a, b) => (a.bpw ?? 99) - (b.bpw ?? 99) };
  const order = (a, b) => {
    const [one, other] = [a, b].map((row) => column.of(row.i)[0]);
    if (!known(one) || !known(other)) return known(other) - known(one);
    return KEPT.down ? other - one : one - other;
  };
  if (column) return [...rows].sort(order);
  return names[KEPT.sort] ? [...rows].sort((a, b) => (KEPT.down ? -1 : 1) * names[KEPT.sort](a, b)) : rows;
}

function overviewHeading(key, name, attributes, again) {
  const at = KEPT.sort === key;
  const sort = () => (Object.assign(KEPT, { down: at && !KEPT.down, sort: key }), again());
  const arrow = at ? h("span", { class: "arrow", "aria-hidden": "true" }, KEPT.down ? "▼" : "▲") : null;
  const order = { "aria-sort": at ? (KEPT.down ? "descending" : "ascending") : "none", "data-column": key };
  return h("th", { scope: "col", ...order, ...attributes }, h("button", { type: "button", "data-key": `texts-${key}`, onclick: sort }, name, arrow));
}
function overviewTable(rows, columns, again) {
  const groups = [...new Set(columns.map((each) => each.group))],
    first = (column) => columns.find((each) => each.group === column.group) === column;
  const heads = groups.map((group) =>
    h("th", { scope: "colgroup", class: "group-name", colspan: columns.filter((each) => each.group === group).length }, h("span", { title: group }, group)),
  );
  const cell = (column, row) => {
    const [text, error, failure] = textCell(column, row.i);
    return h(
      "td",
      { class: first(column) ? "number first" : "number", "data-cell": column.key, title: failure },
      text,
      error ? h("small", { class: "error" }, error) : null,
    );
  };
  const line = (row) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, h("span", { class: "label" }, h("span", {}, row.label))),
      h("td", { class: "number" }, row.size),
      columns.map((column) => cell(column, row)),
    );
  const top = [overviewHeading("label", "model", { rowspan: 2 }, again), overviewHeading("size", "size", { rowspan: 2, class: "number" }, again)];
  const names = columns.map((each) => overviewHeading(each.key, each.name, { class: first(each) ? "number first" : "number" }, again));
  return h("table", {}, h("thead", {}, h("tr", {}, top, heads), h("tr", {}, names)), h("tbody", {}, rows.map(line)));
}

// The table as text, in the order in which it is shown.
const escapedMarkdown = (text) => String(text).replace(/\s+/g, " ").replace(/[\\`*_{}[\]<>#|~^&]/g, "\\$&");
function overviewMarkdown(rows, columns) {
  const line = (cells) => `| ${cells.map(escapedMarkdown).join(" | ")} |`;
  const cells = (row) => columns.map((column) => textCell(column, row.i).slice(0, 2).filter(Boolean).join(" "));
  return [
    line(["model", "size", ...columns.map((each) => `${each.group}: ${each.name}`)]),
    `| :-- | --: |${columns.map(() => " --: |").join("")}`,
    ...rows.map((row) => line([row.label, row.size, ...cells(row)])),
    "",
    ...overviewNotes().map((note) => `- ${escapedMarkdown(note)}`),
    "",
  ].join("\n");
}
function overviewCsv(rows, columns) {
  const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replace(/"/g, '""')}"` : value);
  const line = (cells) => `${cells.map((each) => quoted(String(each ?? ""))).join(",")}\r\n`;
  const raw = (row) => columns.flatMap((column) => column.of(row.i).slice(0, 2));
  const names = columns.flatMap((each) => [each.field, `${each.field}_stderr`]);
  return [["label", "layer_bpw", "file_bytes", ...names], ...rows.map((row) => [TEXTS.find((each) => !each.error).models[row.i].label, row.bpw, row.bytes, ...raw(row)])].map(line).join("");
}
function overviewNotes() {
  const failed = TEXTS.flatMap((text) =>
    text.error ? [`${text.name} failed: ${text.error}`] : text.models.filter((raw) => raw.error).map((raw) => `${raw.label} on ${text.name} failed: ${raw.error}`),
  );
  return [...OVERVIEW.notes, ...failed];
}

function textTabs() {
  const pick = (i) => () => {
    if (i === KEPT.text) return;
    KEPT.focus = true;
    location.hash = hashOf(i); // what listens to it starts the page anew
  };
  const tabs = TEXTS.map(({ name, error }, i) =>
    h(
      "button",
      { type: "button", role: "tab", "aria-selected": String(i === KEPT.text), "aria-controls": "about-text", title: name, "data-key": `text-${i}`, class: error ? "failed" : null, onclick: pick(i) },
      error ? `${name} (failed)` : name,
    ),
  );
  byId("tabs").append(...tabs);
  roving(byId("tabs"), tabs, 1);
  tabs.forEach((tab, i) => tab.setAttribute("tabindex", i === KEPT.text ? "0" : "-1"));
  if (KEPT.focus) tabs[KEPT.text].focus({ preventScroll: true });
  KEPT.focus = false;
}
// The heading of the chosen text, above what a report of this text alone shows; of a text that failed, why.
function textSection() {
  const section = byId("about-text"),
    place = [byId("subtitle"), byId("about"), byId("meaning")];
  section.hidden = false;
  section.dataset.short = "Text";
  section.append(h("h2", {}, SHOWN_TEXT.name), ...place);
  if (!SHOWN_TEXT.error) return;
  section.append(h("p", { class: "failure" }, `This text failed: ${SHOWN_TEXT.error}`));
  for (const each of document.querySelectorAll("main > section")) each.hidden = each !== section;
}
function textsSection() {
  const section = byId("texts"),
    scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of all texts" }),
    place = h("div", { class: "chart" }),
    controls = h("div", { class: "controls" });
  const columns = textColumns(),
    rows = overviewModels(),
    shown = () => sortedOverview(rows, columns);
  const fill = () => {
    const key = document.activeElement && document.activeElement.dataset.key,
      left = scroll.scrollLeft;
    scroll.replaceChildren(overviewTable(shown(), columns, fill));
    scroll.scrollLeft = left;
    const again = key && scroll.querySelector(`[data-key="${CSS.escape(key)}"]`);
    if (again) again.focus({ preventScroll: true });
  };
  section.hidden = false;
  section.append(
    scroll,
    h("div", { class: "acts" }, telling("Copy as Markdown", () => copyText(overviewMarkdown(shown(), columns)), "copy-texts-markdown"), telling("Copy as CSV", () => copyText(overviewCsv(shown(), columns)), "copy-texts-csv")),
    h("ul", { class: "notes" }, overviewNotes().map((note) => h("li", {}, note))),
  );
  fill();
  if (!OVERVIEW.drawings.length) return;
  const again = drawn(place, (width) => dumbbellDrawing(width, chosenDrawing()));
  const choose = () => {
    const options = OVERVIEW.drawings.map((each) => [each.key, each.name]);
    controls.replaceChildren(options.length > 1 ? choice("values", options, chosenDrawing().key, (key) => ((KEPT.drawing = key), again())) : "");
  };
  section.append(controls, place, saveButtons(place, "All texts", legendOf(place), () => chosenDrawing().title));
  choose();
  again();
}
const chosenDrawing = () => OVERVIEW.drawings.find((each) => each.key === KEPT.drawing) || OVERVIEW.drawings[0];
