// Scales, axes, markers, the tooltip, and the controls that sections share.
function scale(kind, low, high, from, to) {
  const turn = kind === "log" ? Math.log : (value) => value;
  const a = turn(low),
    span = turn(high) - a || 1;
  return (value) => from + ((turn(value) - a) / span) * (to - from);
}

function niceTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(wanted, 1),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12) + step * 1e-9; k++) found.push(k * step);
  return found;
}

// Ticks at powers of ten, and at 2 and 5 times these where they are few; within a decade, the ticks of a linear axis.
function ticks(kind, low, high, wanted) {
  if (kind !== "log") return niceTicks(low, high, wanted);
  const decades = Math.log10(high / low);
  if (decades < 0.9) return niceTicks(low, high, wanted);
  const factors = decades < 1.5 && wanted > 5 ? [1, 1.5, 2, 3, 5, 7] : 3 * decades < wanted + 4 ? [1, 2, 5] : [1];
  const step = Math.max(1, Math.ceil(decades / wanted)),
    found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    if (e % step === 0) found.push(...factors.map((factor) => factor * 10 ** e));
  return found.filter((each) => each >= low * 0.9999 && each <= high * 1.0001);
}

function tickText(value, all) {
  const size = Math.max(...all.map(Math.abs));
  if (value && (Math.abs(value) < 1e-4 || size >= 1e6)) {
    const power = Math.floor(Math.log10(Math.abs(value)) + 1e-9),
      lead = Math.round(value / 10 ** power);
    const raised = String(power).replace(/./g, (letter) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[letter] || "⁻");
    return lead === 1 ? `10${raised}` : `${lead}·10${raised}`;
  }
  return String(+value.toPrecision(6)).replace("-", "−");
}

// A drawing of that width, with grid, axes and their names. x and y: {kind, low, high, name}; y can have zero, the place
// at which a logarithmic axis shows 0, and least: below that value there is no other tick. x can have an edge,
// {at, broken, text}: a last tick with that text behind a break of the axis.
function frame(width, height, x, y, label) {
  const up = ticks(y.kind, y.least ?? y.low, y.high, height / 55),
    letters = Math.max(...up.map((each) => tickText(each, up).length));
  const box = { left: Math.max(62, 32 + 7 * letters), right: width - 18, top: 12, bottom: height - 46 };
  const toX = scale(x.kind, x.low, x.high, box.left, box.right),
    toY = scale(y.kind, y.low, y.high, box.bottom, box.top);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": label });
  const across = ticks(x.kind, x.low, x.edge ? x.edge.broken : x.high, width / 90),
    end = x.edge ? toX(x.edge.at) - 3.5 * x.edge.text.length - 6 : Infinity;
  let last = -Infinity;
  for (const each of across) {
    const at = toX(each),
      text = tickText(each, across);
    root.append(svg("line", { class: "grid", x1: at, x2: at, y1: box.top, y2: box.bottom }));
    if (at - last < 7 * text.length + 6 || at + 3.5 * text.length > end) continue;
    root.append(svg("text", { class: "tick", x: at, y: box.bottom + 18, "text-anchor": "middle" }, text));
    last = at;
  }
  for (const each of [...up, ...(y.zero ? [y.zero] : [])]) {
    const at = toY(each),
      text = each === y.zero ? "0" : tickText(each, up);
    root.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }));
    root.append(svg("text", { class: "tick", x: box.left - 8, y: at + 4, "text-anchor": "end" }, text));
  }
  root.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  if (x.edge) {
    const [at, broken] = [x.edge.at, x.edge.broken].map(toX);
    root.append(
      svg("line", { class: "edge", x1: at, x2: at, y1: box.top, y2: box.bottom }),
      svg("text", { class: "tick", x: at, y: box.bottom + 18, "text-anchor": "middle" }, x.edge.text),
      svg("text", { class: "break", x: broken, y: box.bottom + 4, "text-anchor": "middle" }, "//"),
    );
  }
  root.append(
    svg("text", { class: "name", x: (box.left + box.right) / 2, y: height - 8, "text-anchor": "middle" }, x.name),
  );
  const middle = (box.top + box.bottom) / 2;
  root.append(
    svg(
      "text",
      { class: "name", x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` },
      y.name,
    ),
  );
  return { root, box, toX, toY };
}

// Matplotlib's markers, which eval/plots/style.py (MARKERS) names by a letter.
function shape(kind, x, y, r) {
  const ring = (corners, turn, size) =>
    Array.from({ length: corners }, (_, i) => {
      const angle = turn + (2 * Math.PI * i) / corners;
      return `${x + size * Math.sin(angle)},${y - size * Math.cos(angle)}`;
    });
  const path = (points) => `M${points.join("L")}Z`,
    turned = (degrees) => (Math.PI * degrees) / 180;
  const arm = r / 2.6,
    cross = [
      [-arm, -r],
      [arm, -r],
      [arm, -arm],
      [r, -arm],
      [r, arm],
      [arm, arm],
      [arm, r],
      [-arm, r],
      [-arm, arm],
      [-r, arm],
      [-r, -arm],
      [-arm, -arm],
    ];
  const tilt = (points, by) =>
    points.map(([a, b]) => [a * Math.cos(by) - b * Math.sin(by), a * Math.sin(by) + b * Math.cos(by)]);
  const shapes = {
    s: () => path(ring(4, turned(45), r * 1.25)),
    "^": () => path(ring(3, 0, r * 1.25)),
    D: () => path(ring(4, 0, r * 1.25)),
    v: () => path(ring(3, turned(180), r * 1.25)),
    "<": () => path(ring(3, turned(270), r * 1.25)),
    ">": () => path(ring(3, turned(90), r * 1.25)),
    p: () => path(ring(5, 0, r * 1.15)),
    P: () => path(cross.map(([a, b]) => `${x + a},${y + b}`)),
    X: () => path(tilt(cross, turned(45)).map(([a, b]) => `${x + a},${y + b}`)),
  };
  return (shapes[kind] || (() => `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0Z`))();
}
// A group's marker; or, with a dash (null: a solid line), a line long enough to tell dashes apart, for one model.
function swatch(group, dash) {
  const colour = colourOf(group),
    width = dash === undefined ? 14 : 34;
  const sign =
    dash === undefined
      ? svg("path", { d: shape(PAYLOAD.styles[group][1], 7, 7, 5), fill: colour, class: "mark" })
      : svg("line", { x1: 0, x2: width, y1: 7, y2: 7, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash });
  return svg("svg", { width, height: 14, "aria-hidden": "true", class: "swatch" }, sign);
}

// The tooltip: rows of [name, text] under a heading, beside a place (a function, since the page may scroll), inside the browser's window.
const tip = byId("tip");
let tipPlace = null;
// Hides the tooltip; with a place only if it is the place of the one shown, as a finger shows the next before it leaves.
function hideTip(place = tipPlace) {
  if (place === tipPlace) tip.hidden = true;
}
function showTip(heading, rows, place) {
  const terms = rows.map(([name, text]) =>
    name ? [h("dt", {}, name), h("dd", {}, text)] : [h("dd", { class: "wide" }, text)],
  );
  tip.replaceChildren(h("strong", {}, heading), h("dl", {}, terms));
  tip.hidden = false;
  tipPlace = place;
  moveTip();
}
// Right of its place, else left, else below, else above: where it is whole. A place that scrolled away has none.
function moveTip() {
  if (tip.hidden) return;
  const place = tipPlace(),
    { width, height } = tip.getBoundingClientRect(),
    { clientWidth, clientHeight } = document.documentElement;
  if (place.bottom < 0 || place.top > clientHeight) return hideTip();
  const within = (at, size, room) => Math.min(Math.max(at, 6), Math.max(room - size - 6, 6));
  const x = within((place.left + place.right - width) / 2, width, clientWidth),
    y = within(place.top - 10, height, clientHeight);
  const places = [
    [place.right + 12, y],
    [place.left - width - 12, y],
    [x, place.bottom + 10],
    [x, place.top - height - 10],
  ];
  const [left, top] = places.find(
    ([a, b]) => a >= 6 && a + width <= clientWidth - 6 && b >= 6 && b + height <= clientHeight - 6,
  ) || [x, within(place.bottom + 10, height, clientHeight)];
  tip.style.setProperty("left", `${left}px`);
  tip.style.setProperty("top", `${top}px`);
}
// Shows a tooltip while the pointer is over an element, or while it has the focus, which a finger gives it.
function explain(node, heading, rows) {
  const place = () => node.getBoundingClientRect(),
    show = () => showTip(heading, typeof rows === "function" ? rows() : rows, place);
  node.addEventListener("pointerenter", show);
  node.addEventListener("focus", show);
  node.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && hideTip(place));
  node.addEventListener("blur", () => hideTip(place));
  return node;
}

// Radio buttons; pick is called with the value that is chosen.
function choice(legend, options, chosen, pick) {
  const name = `choice-${legend.replace(/\W+/g, "-")}`;
  const button = ([value, text]) =>
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
  return h("fieldset", { class: "choice" }, h("legend", {}, legend), h("div", {}, options.map(button)));
}
function groupButtons(where) {
  const button = (group) =>
    h(
      "button",
      {
        type: "button",
        class: "group",
        "aria-pressed": String(!state.hidden.has(group)),
        "data-group": group,
        "data-key": `${where}-group-${GROUPS.indexOf(group)}`,
        onclick: () => toggleGroup(group),
      },
      swatch(group),
      group,
    );
  return h("div", { class: "groups", role: "group", "aria-label": "Groups shown" }, GROUPS.map(button));
}
function modelSelect(name, id, models, pick) {
  const option = (each) => h("option", { value: each.id, selected: each.id === id }, each.label);
  return h(
    "label",
    { class: "pick" },
    name,
    " ",
    h(
      "select",
      { "data-key": `pick-${name}`, onchange: (event) => pick(Number(event.target.value)) },
      models.map(option),
    ),
  );
}

// One tab stop for many cells: arrow keys move between them, up and down by ``columns`` cells.
function roving(parent, cells, columns) {
  cells.forEach((cell, i) => cell.setAttribute("tabindex", i ? "-1" : "0"));
  parent.addEventListener("keydown", (event) => {
    const at = cells.indexOf(event.target),
      steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    const to = cells[at + (steps[event.key] ?? 0)];
    if (at < 0 || !steps[event.key] || !to) return;
    event.preventDefault();
    cells[at].setAttribute("tabindex", "-1");
    to.setAttribute("tabindex", "0");
    to.focus();
  });
}
// A function that draws into a place; it is called again whenever the width of the place changes.
function drawn(place, draw) {
  let width = 0;
  const again = () => {
    width = place.clientWidth;
    if (width) place.replaceChildren(...[draw(width)].flat());
  };
  new ResizeObserver(() => place.clientWidth !== width && again()).observe(place);
  return again;
}
