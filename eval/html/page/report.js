// The report: choosing drawings, sorting and copying tables, selecting models, tooltips, differences, tokens. Every number
// is Python's; text of specs, labels and tokens enters as text nodes only.
const DATA = JSON.parse(document.getElementById("payload").textContent);
const TEXTS = DATA.results.texts;
const root = document.documentElement;
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const byId = (id) => document.getElementById(id);
const state = {
  text: Math.max(
    TEXTS.findIndex((text) => !text.error),
    0,
  ),
  chosen: DATA.chosen,
  hidden: new Set(),
};
const article = () => byId(`text-${state.text}`);
const page = () => DATA.pages[state.text];
const redrawn = []; // called whenever the selected models or the text change

// An element. Attributes: "on..." listens; null, undefined and false are left out.
function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const hint = (text) => h("p", { class: "hint" }, text);
const grid = (kind, heads, rows) =>
  h("table", { class: kind }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
const scrolling = (table) => h("div", { class: "scroll" }, table);
const known = (value) => typeof value === "number" && Number.isFinite(value);
const short = (value, digits = 3) =>
  known(value) ? String(Number(value.toPrecision(digits))).replace("-", "−") : "n/a";
function probability(logprob) {
  const percent = 100 * Math.exp(logprob);
  return !known(logprob)
    ? "n/a"
    : percent < 0.0001
      ? "< 0.0001 %"
      : percent > 99.95
        ? "> 99.9 %"
        : `${short(percent)} %`;
}

// The tooltip: rows of [name, words] beside an element, inside the window.
const tip = byId("tip");
let tipOf = null;
function hideTip(node = tipOf) {
  if (node === tipOf) [tip.hidden, tipOf] = [true, null];
}
function showTip(node, heading, rows) {
  const terms = rows.map(([name, words]) =>
    name ? [h("dt", {}, name), h("dd", {}, words)] : h("dd", { class: "wide" }, words),
  );
  tip.replaceChildren(h("strong", {}, heading), h("dl", {}, terms));
  [tip.hidden, tipOf] = [false, node];
  moveTip();
}
// Right of its element, else left, below, above: where it is whole. An element that scrolled away has none.
function moveTip() {
  if (!tipOf) return;
  const place = tipOf.getBoundingClientRect(),
    { width, height } = tip.getBoundingClientRect(),
    { clientWidth, clientHeight } = root;
  if (place.bottom < 0 || place.top > clientHeight || !place.width) return hideTip();
  const within = (at, size, room) => Math.min(Math.max(at, 6), Math.max(room - size - 6, 6)),
    x = within((place.left + place.right - width) / 2, width, clientWidth),
    y = within(place.top - 10, height, clientHeight);
  const places = [
    [place.right + 12, y],
    [place.left - width - 12, y],
    [x, place.bottom + 10],
    [x, place.top - height - 10],
  ];
  const fits = ([a, b]) => a >= 6 && a + width <= clientWidth - 6 && b >= 6 && b + height <= clientHeight - 6;
  const [left, top] = places.find(fits) || [x, within(place.bottom + 10, height, clientHeight)];
  tip.style.setProperty("left", `${left}px`);
  tip.style.setProperty("top", `${top}px`);
}
// Shows what ``words`` gives, [heading, rows], while the pointer is over a node, or while it has the focus.
function explain(node, words) {
  const show = () => showTip(node, ...words());
  node.addEventListener("pointerenter", show);
  node.addEventListener("focus", show);
  node.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && hideTip(node));
  node.addEventListener("blur", () => hideTip(node));
  return node;
}
// One tab stop for many cells: arrow keys move between them, up and down by ``columns`` cells.
function roving(parent, cells, columns) {
  cells.forEach((cell, i) => cell.setAttribute("tabindex", i ? "-1" : "0"));
  parent.addEventListener("keydown", (event) => {
    const at = cells.indexOf(event.target),
      to = cells[at + ({ ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key] ?? 0)];
    if (at < 0 || !to || to === event.target) return;
    event.preventDefault();
    cells[at].setAttribute("tabindex", "-1");
    to.setAttribute("tabindex", "0");
    to.focus();
  });
}
const enter = (act) => (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), act());

// Models: rows of tables and marks of drawings of one model go together.
const groupOf = {};
for (const row of all("tr[data-group]")) groupOf[row.dataset.model] = row.dataset.group;
const failed = (id) => !TEXTS.some((text) => !text.error && !text.models[id].error);
const visible = (id) => !state.hidden.has(groupOf[id]);
const shown = () =>
  page()
    .labels.map((_, id) => id)
    .filter((id) => visible(id) && !TEXTS[state.text].models[id].error);
function toggle(id) {
  if (failed(id)) return;
  state.chosen = state.chosen.includes(id) ? state.chosen.filter((other) => other !== id) : [...state.chosen, id];
  changed();
}
function changed() {
  const key = document.activeElement?.dataset.key;
  hideTip();
  const chosen = state.chosen.filter(visible);
  for (const node of all("[data-model]")) {
    const id = Number(node.dataset.model);
    node.classList.toggle("chosen", chosen.includes(id));
    node.classList.toggle("hidden", !visible(id));
    const box = node.tagName === "TR" && node.querySelector("input");
    if (box) box.checked = chosen.includes(id);
    if (node.hasAttribute("aria-label")) node.setAttribute("aria-pressed", String(chosen.includes(id)));
  }
  for (const svg of all(".chart svg")) svg.classList.toggle("fading", chosen.length > 0);
  for (const button of all(".group"))
    button.setAttribute("aria-pressed", String(!state.hidden.has(button.dataset.group)));
  const label = (id) => TEXTS.flatMap((text, i) => (text.error ? [] : [DATA.pages[i].labels[id]]))[0];
  const chip = (id) =>
    h(
      "button",
      {
        type: "button",
        class: "chip",
        "data-key": `chip-${id}`,
        "aria-label": `unselect ${label(id)}`,
        onclick: () => toggle(id),
      },
      label(id),
      " ×",
    );
  const unselect = () => ((state.chosen = []), changed()),
    none = h("button", { type: "button", class: "act", onclick: unselect }, "Unselect all");
  byId("chips").replaceChildren(...chosen.map(chip), ...(chosen.length > 2 ? [none] : []));
  for (const draw of redrawn) draw();
  all(".scroll:not([data-watched]), .chart:not([data-watched])").forEach(watchWidth);
  if (key) document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}
// What is wider than its place says so, and is pale at the edge behind which there is more.
function watchWidth(node) {
  const look = () => {
    const hidden = node.scrollWidth - node.clientWidth;
    node.classList.toggle("wide", hidden > 1);
    node.classList.toggle("cut", node.scrollLeft < hidden - 1);
  };
  node.dataset.watched = "";
  node.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(node);
}
function highlight(id, on) {
  for (const node of all(`[data-model="${id}"]`)) node.classList.toggle("hover", on);
}
function markOfDrawing(node) {
  const id = Number(node.dataset.model),
    several = node.dataset.text,
    text = () => (several === undefined ? Number(node.closest("article").dataset.text) : Number(several)),
    heading = () => DATA.pages[text()].labels[id] + (several === undefined ? "" : ` on ${TEXTS[text()].name}`);
  if (node.hasAttribute("aria-label") || node.matches("article .label"))
    explain(node, () => [heading(), DATA.pages[text()].tips[id]]);
  node.addEventListener("click", () => toggle(id));
  node.addEventListener(
    "keydown",
    enter(() => toggle(id)),
  );
}
// Whatever shows a model is highlighted with everything else that shows it.
function linked(within) {
  for (const node of all("[data-model]", within)) {
    node.addEventListener("pointerenter", () => highlight(node.dataset.model, true));
    node.addEventListener("pointerleave", () => highlight(node.dataset.model, false));
    if (node.closest(".chart")) markOfDrawing(node);
  }
}
function models() {
  for (const row of all("tr[data-model]")) {
    const id = Number(row.dataset.model);
    row.addEventListener("click", (event) => event.target.tagName !== "INPUT" && toggle(id));
    row.querySelector("input")?.addEventListener("change", () => toggle(id));
  }
  linked(document);
  for (const button of all(".group"))
    button.addEventListener("click", () => {
      if (!state.hidden.delete(button.dataset.group)) state.hidden.add(button.dataset.group);
      changed();
    });
}

// Tables: a click on a column's name sorts by it, a second one reverses; what has no value stays last.
function sortBy(table, head) {
  const at = [...head.parentNode.children].indexOf(head),
    down = head.getAttribute("aria-sort") === "ascending",
    isNumber = head.classList.contains("number"),
    value = (row) => row.children[at].dataset.value;
  const order = (a, b) => {
    if (value(a) === undefined || value(b) === undefined) return (value(a) === undefined) - (value(b) === undefined);
    const off = isNumber ? value(a) - value(b) : value(a).localeCompare(value(b), "en", { numeric: true });
    return down ? -off : off;
  };
  const rows = all("tbody tr", table);
  table.tBodies[0].append(...rows.sort((a, b) => a.dataset.model - b.dataset.model).sort(order));
  for (const other of all("thead th", table))
    other.setAttribute("aria-sort", other !== head ? "none" : down ? "descending" : "ascending");
}
// Where a table does not fit, the columns that are compared come first, and words last.
const FIRST = ["label", "bpw_layer", "kld", "ppl", "same_top", "ratio", "kld_p99.9", "size", "vram_gib"];
const narrow = matchMedia("(max-width: 70rem)");
function arrange(table) {
  table.dataset.fixed ??
    all("tr", table).forEach((row) => {
      row.cells_ = row.cells_ || [...row.children];
      const place = (cell) => {
        const name = cell.dataset.column || "label";
        return FIRST.includes(name) ? FIRST.indexOf(name) : cell.classList.contains("number") ? 50 : 99;
      };
      row.append(...(narrow.matches ? [...row.cells_].sort((a, b) => place(a) - place(b)) : row.cells_));
    });
}
function tables() {
  for (const table of all("table:has(th button)")) {
    for (const head of all("thead th", table))
      head.querySelector("button").addEventListener("click", () => sortBy(table, head));
    if (table.closest("article")) {
      arrange(table);
      narrow.addEventListener("change", () => arrange(table));
    }
  }
  // What --markdown and --csv write, of the rows that are shown, in the order in which they are shown.
  for (const button of all("[data-copy]")) {
    const of = button.closest("article, #texts");
    saying(button, () => {
      const found = of.id === "texts" ? DATA.overview : DATA.pages[of.dataset.text],
        ids = all("table:has([aria-sort]) tbody tr:not(.hidden)", of).map((row) => Number(row.dataset.model));
      if (button.dataset.copy === "csv")
        return copyText(
          typeof found.csv === "string"
            ? found.csv
            : [0, ...ids.map((id) => id + 1)].map((line) => `${found.csv[line]}\r\n`).join(""),
        );
      const { markdown: lines } = found, // its title, an empty line, names and alignment of the columns; then a line a row
        count = all("table:has([aria-sort]) tbody tr", of).length;
      return copyText([...lines.slice(0, 4), ...ids.map((id) => lines[4 + id]), ...lines.slice(4 + count)].join("\n"));
    });
  }
}

// A button that says for a moment what became of its click.
function saying(button, act) {
  const words = button.textContent;
  button.setAttribute("aria-live", "polite");
  button.addEventListener("click", async () => {
    button.textContent = (await act()) ? "Done" : "Not possible here";
    setTimeout(() => (button.textContent = words), 1500);
  });
  return button;
}
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h("textarea", { class: "unseen", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy"); // where a browser has no clipboard for files
    field.remove();
    return done;
  }
}

// Drawings: the chosen one of a section, saved as SVG, or painted as PNG, with the colours that it has at that moment.
const LOOKS = ["fill", "stroke", "stroke-width", "paint-order", "font-family"];
function literal(svg) {
  const copy = svg.cloneNode(true),
    [, , width, height] = svg.getAttribute("viewBox").split(" ");
  const nodes = all("*", copy);
  all("*", svg).forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const name of LOOKS)
      if (node.tagName === "text" || node.hasAttribute(name)) nodes[i].setAttribute(name, style.getPropertyValue(name));
  });
  for (const [name, value] of Object.entries({ width, height, xmlns: "http://www.w3.org/2000/svg" }))
    copy.setAttribute(name, value);
  return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
}
async function asPng(blob, times = 3) {
  const url = URL.createObjectURL(blob),
    image = new Image();
  image.src = url;
  await image.decode();
  const canvas = h("canvas", { width: times * image.width, height: times * image.height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(url);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
// The drawings that are not shown at first are in the file deflated.
async function inflate(figure) {
  const { deflated } = figure.dataset;
  if (!deflated) return;
  delete figure.dataset.deflated;
  const bytes = Uint8Array.from(atob(deflated), (letter) => letter.charCodeAt(0)),
    stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  figure.innerHTML = await new Response(stream).text();
  linked(figure);
  changed();
}
function drawings() {
  for (const section of all("section:has(figure[data-choice])")) {
    const figures = all("figure[data-choice]", section),
      fields = all(".choice", section),
      keys = (figure) => figure.dataset.choice.split(" "),
      current = () => figures.find((figure) => !figure.hidden);
    const show = (shown) => {
      for (const figure of figures) figure.hidden = figure !== shown;
      for (const field of fields)
        all("input", field).find((input) => input.value === keys(shown)[field.dataset.place]).checked = true;
      inflate(shown);
    };
    fields.forEach((field, i) => all("input", field).forEach((input) => (input.name = `${section.id}-${i}`)));
    show(figures[0]);
    section.addEventListener("change", (event) => {
      const place = event.target.closest(".choice")?.dataset.place,
        wanted = keys(current());
      if (!place) return;
      wanted[place] = event.target.value;
      // Not every value is drawn over every size.
      const fitting = figures.filter((figure) => keys(figure)[place] === wanted[place]);
      show(fitting.find((figure) => figure.dataset.choice === wanted.join(" ")) ?? fitting[0]);
    });
    for (const button of all("[data-save]", section))
      saying(button, async () => {
        const svg = current().querySelector("svg"),
          kind = button.dataset.save;
        if (!svg) return false;
        const blob = kind === "svg" ? literal(svg) : await asPng(literal(svg)),
          url = URL.createObjectURL(blob);
        h("a", {
          href: url,
          download: `${section.id}_${current().dataset.choice.replace(/[^\w.]+/g, "_")}.${kind}`,
        }).click();
        setTimeout(() => URL.revokeObjectURL(url), 10_000);
        return true;
      });
  }
}

function select(name, id, ids, pick) {
  const option = (each) => h("option", { value: each, selected: each === id }, page().labels[each]);
  return h(
    "label",
    { class: "pick" },
    name,
    " ",
    h("select", { "data-key": `pick-${name}`, onchange: (event) => pick(Number(event.target.value)) }, ids.map(option)),
  );
}
function choice(legend, options, chosen, pick) {
  const name = `choice-${legend.replace(/\W+/g, "-")}`;
  const radio = ([value, text]) =>
    h(
      "label",
      {},
      h("input", {
        type: "radio",
        name,
        value,
        checked: value === chosen,
        "data-key": `${name}-${value}`,
        onchange: () => pick(value),
      }),
      h("span", {}, text),
    );
  return h("fieldset", { class: "choice" }, h("legend", {}, legend), h("div", {}, options.map(radio)));
}

// Differences of two models, and of all pairs.
const pairing = { a: null, b: null, score: null };
const NAMES = { nll: "ln(PPL A / PPL B)", kld: "KLD A − KLD B", same_top: "same top A − B, % points" };
// [difference of the earlier row minus the later, interval, verdict of a against b, percent] of a score, or why there is none.
function difference(a, b, score) {
  const [one, other] = a < b ? [a, b] : [b, a],
    found =
      page().pairs[score].of[`${one}-${other}`] ??
      "not in this report of so many rows: compare-q show ... --pair A B";
  return typeof found === "string"
    ? found
    : [found[0], found[1], a > b && found[2] !== 2 ? -found[2] : found[2], found[3]];
}
function verdict(a, b, value) {
  if (value === 2) return "not ranked: both are at most about twice the noise floor's";
  return value ? `${page().labels[value > 0 ? a : b]} is better` : "not told apart";
}
function pairTable(a, b) {
  const row = (score) => {
    const found = difference(a, b, score);
    if (typeof found === "string")
      return h(
        "tr",
        { "data-difference": score },
        h("th", { scope: "row" }, NAMES[score]),
        h("td", { colspan: 3 }, `n/a: ${found}`),
      );
    const numbers = [found[0], found[1]].map((text) => h("td", { class: "number" }, text));
    return h(
      "tr",
      { "data-difference": score },
      h("th", { scope: "row" }, NAMES[score]),
      numbers,
      h("td", {}, verdict(a, b, found[2]), found[3] ? `; PPL ${found[3]}` : ""),
    );
  };
  const heads = ["", "difference", "95 % interval", ""].map((text) =>
    h("th", { scope: "col", class: text ? "number" : null }, text),
  );
  return scrolling(grid("pair", heads, Object.keys(page().pairs).map(row)));
}
function matrix(score, pick) {
  const ids = page().pairs[score].order.filter(visible);
  if (ids.length < 2) return hint("No more than 60 models fit, and two at least are needed.");
  const cell = (a) => (b) => {
    if (a === b) return h("td", { class: "cell", role: "img", "aria-label": page().labels[a] });
    const found = difference(a, b, score),
      said = typeof found === "string" ? `n/a: ${found}` : verdict(a, b, found[2]),
      sign = typeof found === "string" ? "·" : { 1: "+", "-1": "−" }[found[2]] || "";
    const look = {
      class: `cell ${{ "+": "better", "−": "worse" }[sign] || ""}`,
      role: "button",
      "data-key": `pair-${a}-${b}`,
      "data-a": a,
      "data-b": b,
    };
    const node = h(
      "td",
      {
        ...look,
        "aria-label": `${page().labels[a]} against ${page().labels[b]}: ${said}`,
        onclick: () => pick(a, b),
        onkeydown: enter(() => pick(a, b)),
      },
      sign,
    );
    return explain(node, () => [`${page().labels[a]} against ${page().labels[b]}`, [["", said]]]);
  };
  const cells = ids.map((a) => ids.map(cell(a))),
    row = (a, i) =>
      h("tr", {}, h("th", { scope: "row" }, h("span", {}, page().labels[a]), h("b", {}, i + 1)), cells[i]);
  const heads = ids.map((_, i) => h("th", { scope: "col" }, i + 1)),
    table = grid("matrix", [h("td", {}), ...heads], ids.map(row));
  roving(table, cells.flat(), ids.length);
  return scrolling(table);
}
function differences() {
  const section = article().querySelector(".differences");
  if (!section) return;
  const scores = Object.keys(page().pairs),
    ids = shown(),
    chosen = state.chosen.filter((id) => ids.includes(id)),
    usual = [...page().pairs[scores.includes("kld") ? "kld" : scores[0]].order, ...ids].filter((id) =>
      ids.includes(id),
    );
  if (!scores.includes(pairing.score)) pairing.score = scores.includes("kld") ? "kld" : scores[0];
  if (chosen.length > 1 && String(chosen) !== pairing.of) [pairing.a, pairing.b] = chosen.slice(-2);
  pairing.of = String(chosen);
  if (!ids.includes(pairing.a)) pairing.a = usual[0];
  if (!ids.includes(pairing.b) || pairing.b === pairing.a) pairing.b = usual.find((id) => id !== pairing.a);
  if (pairing.a > pairing.b) [pairing.a, pairing.b] = [pairing.b, pairing.a]; // A is the earlier row
  const pick = (a, b) => (Object.assign(pairing, { a, b }), changed());
  const swap = (a, b) => pick(a, a === b ? ids.find((id) => id !== a) : b);
  section.replaceChildren(
    section.querySelector("h2"),
    hint(
      "Both models scored the same tokens: a block of the text that is hard for one is hard for the other, and that cancels. ± is one standard error of the difference; intervals hold the difference for 95 % of such texts. A is the earlier row.",
    ),
    h(
      "div",
      { class: "controls" },
      select("A", pairing.a, ids, (id) => swap(id, pairing.b)),
      select("B", pairing.b, ids, (id) => swap(id, pairing.a)),
    ),
    pairing.b === undefined ? hint("Show two models.") : pairTable(pairing.a, pairing.b),
    h("h3", {}, "All pairs"),
    h(
      "div",
      { class: "controls" },
      scores.length > 1
        ? choice(
            "compare by",
            scores.map((score) => [score, page().pairs[score].title]),
            pairing.score,
            (score) => ((pairing.score = score), changed()),
          )
        : "",
    ),
    matrix(pairing.score, pick),
    hint(
      "A row's model against a column's: + better, − worse; unmarked: the 95 % interval holds 0, or KLD does not rank them. Best first. A click shows a pair above.",
    ),
  );
}

// The text's tokens, coloured by what they cost a model, and the tokens that suffered most.
const PAINTS = { kld: "KLD", more: "loss − reference", loss: "loss" };
const inspecting = { id: null, paint: "kld" };
const visibleText = (text, end = "↵\n") => (text === "" ? "▯" : text.replace(/\n/g, end));
const floorOf = () => TEXTS[state.text].models.findIndex((model) => model.label === page().floor);
// A token's value for its colour: above the noise floor's at the same token, where there is one.
function beyond(passage, id, i, paint, above) {
  const lost = (m) => {
    const logprob = passage.logprob[m]?.[i],
      reference = passage.ref_logprob?.[i];
    if (paint === "kld") return passage.kld[m]?.[i];
    return !known(logprob) || (paint === "more" && !known(reference))
      ? null
      : (paint === "more" ? reference : 0) - logprob;
  };
  const value = lost(id),
    base = above ? lost(floorOf()) : 0;
  return known(value) && known(base) ? value - base : null;
}
function tokenRows(passage, id, i) {
  const rows = [["logprob", `${short(passage.logprob[id]?.[i])} (${probability(passage.logprob[id]?.[i])})`]];
  if (passage.ref_logprob)
    rows.push(["reference's", `${short(passage.ref_logprob[i])} (${probability(passage.ref_logprob[i])})`]);
  if (passage.kld[id]) rows.push(["KLD", short(passage.kld[id][i])]);
  return [...rows, ["token", placeOf(passage, i, i)]];
}
// Windows that are spread over the text are not scored in its order.
function placeOf(passage, first, last) {
  const span = (begin) => (first === last ? `${begin + first}` : `${begin + first} to ${begin + last}`),
    inWindow = `${span(passage.position)} of window ${passage.window + 1} in scoring order`;
  return known(passage.start) ? `${span(passage.start)} of the text, ${inWindow}` : inWindow;
}
function passageFigure(passage, id, paint, { steps, above }) {
  const cells = passage.tokens.map((text, i) => {
    const value = beyond(passage, id, i, paint, above),
      gain = value < 0,
      step =
        known(value) && (!gain || paint === "more")
          ? steps.findLastIndex((least) => least !== null && Math.abs(value) >= least) + 1
          : 0;
    const cell = h(
      "span",
      { class: gain && step ? "token gain" : "token", role: "listitem", "data-step": step || null },
      visibleText(text),
    );
    return explain(cell, () => [JSON.stringify(text), tokenRows(passage, id, i)]);
  });
  const where = `Tokens ${placeOf(passage, 0, passage.tokens.length - 1)}`,
    list = h("div", { class: "passage", role: "list", "aria-label": where }, cells);
  roving(list, cells, 10);
  return h("figure", {}, h("figcaption", {}, where + (passage.chosen ? `: ${passage.chosen}` : "")), list);
}
function colourLegend(paint, { steps, above, noise, tokens }) {
  const shares = [50, 25, 10, 5, 1],
    name = paint === "more" ? "loss above the reference's" : PAINTS[paint],
    what = above
      ? `how far its ${name} lies above that of the noise floor (${page().floor}) at the same token`
      : `its ${name}, as the row has it`;
  const items = steps.map(
      (step, k) =>
        step !== null &&
        h("li", {}, h("span", { class: "token", "data-step": k + 1 }, `≥ ${short(step, 2)}`), `${shares[k]} %`),
    ),
    gains =
      paint === "more" &&
      h("li", {}, h("span", { class: "token gain", "data-step": 3 }, "dotted"), "less loss, by as much");
  return [
    hint(
      `Colour of a token: ${what}, in nats, in quantiles of the ${tokens} tokens shown (the last colour has 1 % of them).` +
        (above
          ? ` No colour: below ${short(noise, 2)} nats, as 99 % of the noise floor's own are, or below the upper half.`
          : ""),
    ),
    items.some(Boolean)
      ? h("ul", { class: "legend" }, items, gains)
      : hint("No token has a colour: nothing here can be told from noise."),
  ];
}
function sufferers(rows) {
  const byKld = rows.some((token) => known(token.kld)),
    head = (text) => h("th", { scope: "col", class: "number" }, text),
    around = (text) => h("span", { class: "around" }, text.replace(/\n/g, "↵"));
  const row = (token) =>
    h(
      "tr",
      {},
      [short(byKld ? token.kld : -token.logprob), probability(token.ref_logprob), probability(token.logprob)].map(
        (text) => h("td", { class: "number" }, text),
      ),
      h(
        "td",
        { class: "context" },
        around(token.before),
        h("mark", {}, visibleText(token.token, "↵")),
        around(token.after),
      ),
    );
  const heads = [byKld ? "KLD" : "loss", "reference", "model"].map(head);
  heads.push(h("th", { scope: "col" }, "token and what is around it"));
  return scrolling(grid("worst", heads, rows.map(row)));
}
function tokens() {
  const section = article().querySelector(".tokens"),
    found = DATA.inspections[state.text];
  if (!section || !found) return section && section.replaceChildren();
  const { models } = TEXTS[state.text],
    ids = models.map((_, id) => id).filter((id) => found.worst[id]),
    last = state.chosen.filter((id) => ids.includes(id)).at(-1);
  if (last !== undefined && last !== inspecting.last) inspecting.id = last;
  inspecting.last = last;
  if (!ids.includes(inspecting.id))
    inspecting.id = ids.find((id) => !models[id].reference && !models[id].noise_floor) ?? ids[0];
  if (inspecting.id === undefined) return section.replaceChildren();
  const { id } = inspecting,
    passages = found.passages.filter((passage) => passage.logprob[id]),
    paints = page().paints[id],
    kinds = Object.keys(paints).filter((kind) => kind === "loss" || !models[id].reference),
    paint = kinds.includes(inspecting.paint) ? inspecting.paint : kinds[0],
    pick = (values) => (Object.assign(inspecting, values), tokens()),
    without = models.flatMap((model, i) => (found.worst[i] || model.error ? [] : [page().labels[i]]));
  const focused = document.activeElement?.dataset.key;
  section.replaceChildren(
    section.querySelector("h2"),
    h(
      "div",
      { class: "controls" },
      select("Model", id, ids, (value) => pick({ id: value })),
      choice(
        "colour",
        kinds.map((kind) => [kind, PAINTS[kind]]),
        paint,
        (value) => pick({ paint: value }),
      ),
    ),
    ...(paint ? colourLegend(paint, paints[paint]) : []),
    hint(
      "The excerpts are a selection, not a sample: of each quarter of the text the passage in which models differ most, each model's loss beyond the noise floor counted in units of its own mean. Pointer, finger or arrow keys show a token's numbers; ▯ begins a character that the next token ends.",
    ),
    h(
      "div",
      { class: "passages" },
      paint ? passages.map((passage) => passageFigure(passage, id, paint, paints[paint])) : [],
    ),
    h("h3", {}, "Tokens that suffered most"),
    hint(`The largest losses of ${page().labels[id]}; the probabilities are of the text's own token.`),
    sufferers(found.worst[id]),
    without.length ? hint(`Not here, as no report with excerpts was given for their run: ${without.join(", ")}.`) : "",
  );
  if (focused) section.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

// What ran: kernels, versions, options and notes of each model, the machine, the command line.
function record(title, found) {
  const text = (value) => (value !== null && typeof value === "object" ? JSON.stringify(value) : String(value)),
    rows = Object.entries(found || {}).filter(([, value]) => value !== null && value !== "");
  return rows.length
    ? [
        title ? h("h4", {}, title) : null,
        h(
          "dl",
          { class: "terms" },
          rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, text(value))]),
        ),
      ]
    : [];
}
function list(title, texts) {
  return texts?.length
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
function layerTable(groups) {
  const names = {
    layers: "layers",
    count: "count",
    weights: "weights",
    activations: "activations",
    kernel: "kernel",
    asked: "checkpoint asks for",
  };
  const row = (group) =>
    h(
      "tr",
      {},
      Object.keys(names).map((name) => h("td", {}, String(group[name] ?? ""))),
    );
  const heads = Object.values(names).map((name) => h("th", { scope: "col" }, name));
  return scrolling(grid(null, heads, groups.map(row)));
}
function details(model) {
  const { layers, warnings, notes, options, ...rest } = model.provenance || {};
  return [
    model.error ? h("p", {}, `failed: ${model.error}`) : null,
    model.deviations ? h("p", {}, `† ${model.deviations}`) : null,
    model.storage_note ? h("p", {}, `size: ${model.storage_note}`) : null,
    list("Notes", [...new Set([...(model.notes || []), ...(notes || [])])]),
    layers?.length
      ? [h("h4", {}, "Layers"), layerTable(layers)]
      : model.error
        ? null
        : h("p", {}, "kernel n/a: this engine does not say what it runs"),
    record("Engine and machine", rest),
    record("Options as they ran", options),
    h("h4", {}, "Spec"),
    h("pre", {}, JSON.stringify(model.spec, null, 1)),
    list("Warnings of the engine", warnings),
  ];
}
function command(text) {
  return text
    ? [
        h("pre", { class: "command" }, text),
        h(
          "div",
          { class: "acts" },
          saying(h("button", { type: "button", class: "act" }, "Copy the command"), () => copyText(text)),
        ),
      ]
    : [];
}
function ran(text, i) {
  const { parts, created, commit, versions, hardware } = DATA.results;
  const entry = (model, id) => {
    const said = model.error ? "failed" : `${model.engine} · ${model.kernel || "kernel n/a"}`,
      node = h(
        "details",
        { "data-model": id },
        h("summary", {}, h("b", {}, DATA.pages[i].labels[id]), h("span", {}, said)),
      );
    node.addEventListener(
      "toggle",
      () => node.open && node.childElementCount < 2 && node.append(h("div", {}, details(model))),
    );
    return node;
  };
  const merged = (part, k) => [
    h("h3", {}, `Merged: ${part.file}`),
    command(DATA.commands[k]),
    record("", {
      rows: part.labels.join(", "),
      created: part.origin.created,
      commit: part.origin.commit,
      "reference's PPL": part.reference_ppl,
      ...part.origin.versions,
      ...part.origin.hardware,
    }),
  ];
  const several = Boolean(parts?.length);
  article
    .of(i)
    .querySelector(".ran")
    .append(
      ...text.models.map(entry),
      h("div", { class: "parts" }, (parts || []).map(merged)),
      h("h3", {}, several ? "What these runs share" : "This run"),
      h(
        "div",
        {},
        several ? [] : command(DATA.commands[0]),
        record("", { created, commit }),
        record("Versions", versions),
        record("Hardware", hardware),
        record("Data", text.data),
        record("Reference", text.reference),
      ),
    );
}
article.of = (i) => byId(`text-${i}`);

// Several texts: tabs and the address choose the one that is shown.
const hashOf = (i) => `#text=${encodeURIComponent(TEXTS[i].name.replace(/\p{Surrogate}/gu, "\ufffd"))}`;
function showText() {
  const named = TEXTS.findIndex((_, i) => hashOf(i) === location.hash);
  if (named >= 0 && TEXTS.length > 1) state.text = named;
  TEXTS.forEach((_, i) => (article.of(i).hidden = i !== state.text));
  for (const tab of all("[data-tab]")) {
    const at = Number(tab.dataset.tab) === state.text;
    tab.setAttribute("aria-selected", String(at));
    tab.setAttribute("tabindex", at ? "0" : "-1");
    if (at) byId("tabs").scrollLeft = tab.offsetLeft - byId("tabs").offsetLeft - 40;
  }
  const link = (section) => {
    const go = (event) => TEXTS.length > 1 && (event.preventDefault(), section.scrollIntoView()); // the address keeps the text
    return h("li", {}, h("a", { href: `#${section.id}`, onclick: go }, section.dataset.short));
  };
  byId("links").replaceChildren(...all("section", article()).map(link));
  changed();
}
function theme() {
  const button = byId("theme"),
    dark = matchMedia("(prefers-color-scheme: dark)"),
    isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches),
    say = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => ((root.dataset.theme = isDark() ? "light" : "dark"), say()));
  dark.addEventListener("change", say);
  say();
}

theme();
models();
tables();
drawings();
TEXTS.forEach((text, i) => text.error || ran(text, i));
redrawn.push(
  () => page() && differences(),
  () => page() && tokens(),
);
roving(byId("tabs"), all("[data-tab]"), 1);
for (const tab of all("[data-tab]"))
  tab.addEventListener("click", () => (location.hash = hashOf(Number(tab.dataset.tab))));
addEventListener("hashchange", showText);
showText();
document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
document.addEventListener("scroll", moveTip, { capture: true, passive: true });
