// Differences of any two models with paired errors, and of all pairs.
const LARGEST_MATRIX = 60;
const PAIRED = [
  ["nll", "PPL"],
  ["kld", "KLD"],
  ["same_top", "same top"],
].filter(([name]) => MEASURED.filter((m) => m.blocks.whole.includes(name)).length > 1);
const pairing = { a: null, b: null, score: PAIRED.some(([name]) => name === "kld") ? "kld" : "nll" };
const better = (name, value) => (name === "same_top" ? value > 0 : value < 0);

// KLD ranks no two models that are nearly lossless.
const ranked = (a, b, name) => name !== "kld" || !(a.near && b.near);

function verdict(a, b, name, found) {
  if (!known(found.stderr)) return NA;
  if (!distinct(found)) return "not told apart";
  if (!ranked(a, b, name)) return "not ranked: both are within twice the noise floor's";
  return `${better(name, found.value) ? a.label : b.label} is better`;
}
function pairRows(a, b) {
  const rows = [],
    add = (name, text, low, high, say, found) =>
      rows.push(
        h(
          "tr",
          {
            "data-difference": name,
            "data-value": found.value,
            "data-stderr": found.stderr,
            "data-low": found.low,
            "data-high": found.high,
          },
          h("th", { scope: "row" }, text[0]),
          h("td", { class: "number" }, text[1]),
          h("td", { class: "number" }, low === null ? NA : `${low} to ${high}`),
          h("td", {}, say),
        ),
      );
  const nll = pairedDifference(a, b, "nll"),
    like = (found, value, scale = 1) => fixed(value * scale, decimals((found.stderr || found.value || 1) * scale, 2));
  const interval = (found, scale) =>
    known(found.low) ? [like(found, found.low, scale), like(found, found.high, scale)] : [null, null];
  if (nll) {
    const ratio = Math.exp(nll.value),
      error = { value: ratio, stderr: known(nll.stderr) ? ratio * nll.stderr : null };
    add("nll", ["ln(PPL A / PPL B)", plusMinus(nll)], ...interval(nll), verdict(a, b, "nll", nll), nll);
    add(
      "ratio",
      ["PPL A / PPL B", plusMinus(error)],
      ...(known(nll.low) ? [like(error, Math.exp(nll.low)), like(error, Math.exp(nll.high))] : [null, null]),
      "",
      { ...error, low: null, high: null },
    );
  }
  for (const [name, title, scale] of [
    ["kld", "KLD A − KLD B", 1],
    ["same_top", "same top A − B, % points", 100],
  ]) {
    const found = pairedDifference(a, b, name);
    if (found)
      add(name, [title, plusMinus(found, scale)], ...interval(found, scale), verdict(a, b, name, found), found);
  }
  return rows;
}
function pairTable() {
  const a = MODELS[pairing.a],
    b = MODELS[pairing.b],
    rows = pairRows(a, b),
    models = MEASURED;
  const heads = ["", "difference", "95 % interval", ""].map((text) =>
    h("th", { scope: "col", class: text ? "number" : null }, text),
  );
  return [
    h(
      "div",
      { class: "controls" },
      modelSelect("A", pairing.a, models, (id) => ((pairing.a = id), changed())),
      modelSelect("B", pairing.b, models, (id) => ((pairing.b = id), changed())),
    ),
    a === b
      ? h("p", { class: "hint" }, "Pick two different models.")
      : rows.length
        ? h(
            "div",
            { class: "scroll" },
            h("table", { id: "pair" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows)),
          )
        : h("p", { class: "hint" }, "These two cannot be compared: they were not scored on the same finite tokens."),
  ];
}

function matrixCell(a, b, score, largest) {
  const found = a === b ? null : pairedDifference(a, b, score),
    told = distinct(found) && ranked(a, b, score);
  const side = !found || !found.value ? "none" : better(score, found.value) ? "better" : "worse";
  const strength = told
    ? 0.35 + 0.65 * Math.min(Math.log1p(100 * Math.abs(found.value)) / Math.log1p(100 * largest), 1)
    : 0.1;
  const text = !told ? "" : side === "better" ? "+" : "−";
  const cell = h(
    "td",
    {
      class: `cell ${side}${told ? " told" : ""}`,
      "data-a": a.id,
      "data-b": b.id,
      "data-value": found && found.value,
      "data-stderr": found && found.stderr,
      style: { "--strength": found ? strength : 0 },
    },
    a === b ? "" : found ? text : "·",
  );
  if (a === b) return dress(cell, { role: "img", "aria-label": a.label }, []);
  cell.addEventListener("click", () => (Object.assign(pairing, { a: a.id, b: b.id }), changed()));
  dress(
    cell,
    {
      role: "button",
      "aria-label": `${a.label} against ${b.label}: ${found ? verdict(a, b, score, found) : "not comparable"}`,
      "data-key": `pair-${a.id}-${b.id}`,
      onkeydown: (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), cell.click()),
    },
    [],
  );
  const title = PAIRED.find(([name]) => name === score)[1],
    what = score === "nll" ? "ln of the PPL ratio" : `${title} difference`;
  return explain(cell, `${a.label} against ${b.label}`, () =>
    found
      ? [
          [what, plusMinus(found, score === "same_top" ? 100 : 1)],
          ["", verdict(a, b, score, found)],
        ]
      : [["", "not comparable"]],
  );
}
function matrix() {
  const score = pairing.score,
    value = { nll: (m) => m.ppl.value, kld: (m) => m.kld.value, same_top: (m) => -m.same.value }[score];
  const models = MEASURED.filter(visible)
    .filter((m) => m.blocks.whole.includes(score))
    .sort((a, b) => value(a) - value(b));
  if (models.length < 2) return h("p", { class: "hint" }, "Fewer than two shown models can be compared by this.");
  if (models.length > LARGEST_MATRIX)
    return h("p", { class: "hint" }, `No more than ${LARGEST_MATRIX} models fit: of the ${models.length}, hide groups.`);
  let largest = 0;
  for (const a of models)
    for (const b of models) largest = Math.max(largest, Math.abs((pairedDifference(a, b, score) || { value: 0 }).value));
  const cells = models.map((a) => models.map((b) => matrixCell(a, b, score, largest || 1)));
  const row = (a, i) => h("tr", {}, h("th", { scope: "row" }, h("span", {}, a.label), h("b", {}, i + 1)), cells[i]);
  const table = h(
    "table",
    { class: "matrix" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("td", {}),
        models.map((_, i) => h("th", { scope: "col" }, i + 1)),
      ),
    ),
    h("tbody", {}, models.map(row)),
  );
  roving(table, cells.flat(), models.length);
  return h("div", { class: "scroll" }, table);
}

function differencesSection() {
  const section = byId("differences"),
    pair = h("div", {}),
    controls = h("div", { class: "controls" }),
    all = h("div", {});
  section.hidden = !PAIRED.length;
  if (section.hidden) return;
  const ranked = state.chosen.length > 1 ? state.chosen : MEASURED.map((each) => each.id);
  Object.assign(pairing, { a: ranked[0], b: ranked[1] });
  section.append(
    h(
      "p",
      { class: "hint" },
      "Both models scored the same tokens: a block of the text that is hard for one model is hard for the other, and that cancels. ± is one standard error of the difference; intervals hold the difference for 95 % of such texts.",
    ),
    pair,
    h("h3", {}, "All pairs"),
    controls,
    all,
    h(
      "p",
      { class: "hint" },
      "A row's model against a column's: ",
      h("span", { class: "key better" }, "+ better"),
      " ",
      h("span", { class: "key worse" }, "− worse"),
      ", stronger for larger differences; faint and unmarked: the 95 % interval holds 0. Best first. A click shows a pair above.",
    ),
  );
  onChange(() => {
    pair.replaceChildren(...pairTable());
    controls.replaceChildren(
      PAIRED.length > 1 ? choice("compare by", PAIRED, pairing.score, (value) => ((pairing.score = value), changed())) : "",
    );
    all.replaceChildren(matrix());
  });
}
