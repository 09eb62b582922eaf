// PPL, PPL ratio, accuracy, or KLD (the mean, or a percentile of single tokens) over bits per weight, VRAM or file size.
const ofTokens = (key) => (m) => ({ value: m.isReference ? 0 : m.percentiles[key], stderr: null });
const MEASURES = {
  kld: { name: "KLD", axis: "KL divergence / nats", of: (m) => m.kld, zero: true, least: 1 },
  ppl: { name: "PPL", axis: "perplexity", of: (m) => ({ ...m.ppl, stderr: pplError(m).error }), least: -Infinity },
  ratio: { name: "PPL ratio", axis: "perplexity / reference's", of: pplRatio, least: -Infinity },
  acc: { name: "acc", axis: "accuracy / % (acc)", of: accuracyOf("acc"), more: true, least: Infinity },
  acc_norm: { name: "acc norm", axis: "accuracy / % (acc norm)", of: accuracyOf("acc_norm"), more: true, least: Infinity },
  median: { name: "median KLD", axis: "median KLD / nats", of: ofTokens("50"), zero: true, least: 1 },
  p99: { name: "99 % KLD", axis: "99 % KLD / nats", of: ofTokens("99"), zero: true, least: 1 },
  "p99.9": { name: "99.9 % KLD", axis: "99.9 % KLD / nats", of: ofTokens("99.9"), zero: true, least: 1 },
};
const FIRST_MEASURE = RUN.data && RUN.data.answers ? "acc" : COMPARED.length ? "kld" : "ppl"; // eval/plots/measures.py, chosen()
const SIZES = {
  bpw: { name: "bits per weight", axis: "bits per weight (without embedding and head)" },
  vram: { name: "VRAM", axis: "stored weights / GiB (without embedding, with head)" },
  size: { name: "file size", axis: "weight files on disk / GB" },
};
// Whether values above 0 need a logarithmic axis: eval/plots/y_axis.py, is_wide()
function wide(values) {
  const above = values.filter((value) => value > 0);
  return above.length > 0 && Math.max(...above) > PAYLOAD.rule.wide * Math.min(...above);
}
function usualScale(key) {
  const measure = MEASURES[key];
  return measure.zero && wide(MEASURED.map((m) => measure.of(m).value)) ? "log" : "linear";
}
const view = {
  y: FIRST_MEASURE,
  x: "bpw",
  yScale: usualScale(FIRST_MEASURE),
  xScale: "linear",
  labels: "yes",
};

const PERPLEXITY_WORDS = { own: "perplexity", about: "text", paired: "ratio to" };
const ACCURACY_WORDS = { own: "accuracy", about: "questions", paired: "difference from" };

function limits(values, kind, zero) {
  const low = Math.min(...values),
    high = Math.max(...values);
  if (kind === "log") {
    const pad = Math.max((high / low) ** 0.06, 1.02);
    return { kind, low: low / pad, high: high * pad };
  }
  const pad = (high - low) * 0.07 || Math.abs(high) * 0.05 || 1;
  return { kind, low: zero && low >= 0 ? 0 : low - pad, high: high + pad };
}

// Axes over the shown models and their error bars; a value outside them (0 on a logarithmic axis, an outlier) is drawn at
// the edge. As in eval/plots/scatter.py, _set_limits().
function scatterAxes(points) {
  const measure = MEASURES[view.y],
    values = points.map((p) => p.y),
    above = values.filter((v) => v > 0),
    kind = view.yScale === "log" && above.length ? "log" : "linear";
  const top = kind === "log" || (measure.zero && !wide(values)) ? Infinity : ceiling(values, measure.least),
    least = kind === "log" ? Math.min(...above) / 2 : -Infinity; // a bar may reach down to 0
  for (const p of points) {
    p.off = p.y > top ? 1 : kind === "log" && p.y <= 0 ? -1 : 0;
    p.ends = [p.y - (p.error || 0), p.y + (p.error || 0)].map((v) => Math.max(v, least));
  }
  const y = limits(
    points.filter((p) => !p.off).flatMap((p) => p.ends),
    kind,
    measure.zero,
  );
  if (points.some((p) => p.off < 0)) {
    const step = (y.high / y.low) ** 0.045;
    Object.assign(y, { least: y.low, zero: y.low / step, low: y.low / step ** 2 });
  }
  const edge = toEdge(points),
    sizes = points.map((p) => p.x),
    xKind = view.xScale === "log" && Math.min(...sizes) > 0 ? "log" : "linear";
  return [
    { ...limits(sizes, xKind, false), name: SIZES[view.x].axis, edge },
    { ...y, name: measure.axis },
  ];
}

function scatterPoints(models) {
  const measure = MEASURES[view.y];
  return models
    .map((m) => ({ m, x: m[view.x], size: m[view.x], y: measure.of(m).value, error: measure.of(m).stderr }))
    .filter((p) => known(p.x) && known(p.y))
    .map((p) => ({ ...p, cost: measure.more ? -p.y : p.y })); // of which less is better
}

// The lines of the reference and the noise floor, with names where these cover no point; the boxes of names and lines.
function levels(axes, y, points) {
  const of = MEASURES[view.y].of,
    found = [];
  const reference =
    view.y === "ppl" && !REFERENCE && COMPARED.length
      ? COMPARED[0].against.ref_ppl.value
      : REFERENCE && of(REFERENCE).value;
  if (RUN.reference && known(reference)) found.push([reference, `reference: ${brief(RUN.reference.label)}`, "level"]);
  if (FLOOR && MEASURES[view.y].zero && known(of(FLOOR).value))
    found.push([of(FLOOR).value, `noise floor: ${brief(FLOOR.raw.label)}`, "level floor"]);
  const lines = [],
    names = [],
    across = [],
    hit = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
  const spots = points.map((p) => [p.cx - 9, p.cy - 9, p.cx + 9, p.cy + 9]);
  for (const [value, text, className] of found) {
    if (value < y.low || value > y.high) continue;
    const at = axes.toY(value),
      width = textWidth(text),
      box = ([x, top]) => [x, top, x + width, top + 14];
    across.push([axes.box.left, at - 1, axes.box.right, at + 1]);
    lines.push(svg("line", { class: className, x1: axes.box.left, x2: axes.box.right, y1: at, y2: at }));
    const places = [axes.box.right - width, axes.box.left + 6]
      .flatMap((x) => [
        [x, at - 16],
        [x, at + 3],
      ])
      .map(box);
    const free = places.find(
      (each) =>
        each[1] > axes.box.top && each[3] < axes.box.bottom && ![...spots, ...names].some((other) => hit(each, other)),
    );
    if (!free) continue;
    names.push(free);
    lines.push(svg("text", { class: "level-name", x: free[0], y: free[3] - 3 }, text));
  }
  return [lines, names, across];
}

function scatterPoint(p, axes, points) {
  const { m } = p,
    colour = colourOf(m.group),
    inside = !p.off;
  const r = 5.5 + 2.2 * Math.min(p.covering, 4),
    parts = [];
  if (p.error && inside) {
    const [low, high] = p.ends.map(axes.toY);
    parts.push(
      svg("path", {
        class: "bar",
        stroke: colour,
        "data-bar": m.id,
        d: `M${p.cx},${low}V${high}M${p.cx - 3},${low}h6M${p.cx - 3},${high}h6`,
      }),
    );
  }
  if (state.chosen.includes(m.id)) parts.push(svg("circle", { class: "ring", cx: p.cx, cy: p.cy, r: r + 4.5 }));
  parts.push(
    svg("path", {
      d: shape(PAYLOAD.styles[m.group][1], p.cx, p.cy, r),
      class: inside ? "mark" : "mark hollow",
      fill: colour,
      style: inside ? {} : { stroke: colour },
    }),
  );
  if (p.off > 0)
    parts.push(svg("path", { class: "beyond", stroke: colour, d: `M${p.cx},${p.cy - 8}v-8m-4,4l4,-4l4,4` }));
  const also = points.filter((other) => other !== p && Math.hypot(other.cx - p.cx, other.cy - p.cy) < 4);
  const rows = () => [
    ...modelRows(m),
    ...(p.off > 0 ? [["", "drawn at the edge: its value is off the scale"]] : []),
    ...also.map((other) => ["also here", other.m.label]),
  ];
  const node = svg(
    "g",
    {
      class: "point",
      tabindex: "0",
      role: "button",
      "data-key": `point-${m.id}`,
      "data-model": m.id,
      "data-off": p.off || null,
      "aria-pressed": String(state.chosen.includes(m.id)),
      "aria-label": `${m.label}: ${SIZES[view.x].name} ${fixed(p.size, 2)}, ${MEASURES[view.y].name} ${plusMinus(view.y === "ppl" ? m.ppl : MEASURES[view.y].of(m))}`,
      onclick: () => toggleModel(m.id),
      onkeydown: (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), toggleModel(m.id)),
    },
    svg("circle", { class: "target", cx: p.cx, cy: p.cy, r: 11 }),
    parts,
  );
  return explain(node, m.label, rows);
}

function scatterDrawing(width) {
  const models = MEASURED.filter(visible),
    points = scatterPoints(models);
  if (!points.length) return [h("p", { class: "hint" }, "No shown model has both values.")];
  const [x, y] = scatterAxes(points),
    axes = frame(width, Math.round(Math.min(Math.max(width * 0.56, 400), 600)), x, y, `${y.name} over ${x.name}`);
  for (const p of points) {
    p.cx = axes.toX(p.x);
    p.cy = p.off > 0 ? axes.box.top + 18 : axes.toY(p.off < 0 ? y.zero : p.y);
  }
  const [lines, taken, across] = levels(axes, y, points);
  for (const p of points)
    p.covering = points
      .slice(points.indexOf(p) + 1)
      .filter((other) => Math.hypot(other.cx - p.cx, other.cy - p.cy) < 3.5).length;
  axes.root.append(
    ...lines,
    ...series(points).map((members) =>
      svg("path", {
        class: "series",
        stroke: colourOf(members[0].m.group),
        d: `M${members.map((p) => `${p.cx},${p.cy}`).join("L")}`,
      }),
    ),
  );
  const best = paretoFront(points);
  if (view.labels === "yes") axes.root.append(...scatterLabels(points, axes, taken, across, best));
  axes.root.append(...points.map((p) => scatterPoint(p, axes, points)));
  const out = models.filter((m) => !points.some((p) => p.m === m)).map((m) => m.label);
  const missing = `Not drawn, as size or ${MEASURES[view.y].name} is not known: ${out.join(", ")}.`;
  return [axes.root, h("p", { class: "hint" }, caption(points, best)), out.length ? h("p", { class: "hint" }, missing) : []];
}
// The explanation of the error bars and signs in the drawing: eval/plots/figures.py, error_note().
function caption(points, best) {
  const barred = points.filter((p) => p.error && !p.off),
    { own, about, paired } = MEASURES[view.y].more ? ACCURACY_WORDS : PERPLEXITY_WORDS,
    isPaired = (m) => (MEASURES[view.y].more ? accuracyError(m, view.y).paired : view.y !== "ppl" || pplError(m).paired),
    alone = barred.filter((p) => !isPaired(p.m));
  const names = alone.map((p) => p.m.label).join(", "),
    apart = alone.length ? ` (${names}: of the ${own})` : "";
  const what =
    view.y === "kld"
      ? "the mean"
      : alone.length && alone.length === barred.length
        ? `the ${own} (about the ${about}, so nearly common to all)`
        : `the ${paired} the reference's${apart}`;
  const bold = view.labels === "yes" ? "Bold: n" : "N";
  return [
    best.length ? `${bold}o other row shown is smaller and better: ${inWords(best, points)}. ` : "",
    points.some((p) => p.x !== p.size) ? "Unquantized rows stand at the edge, behind the break of the axis. " : "",
    barred.length ? `Error bars: one standard error of ${what}. ` : "",
    points.some((p) => p.off > 0) ? "Hollow, with an arrow: off the scale. " : "",
    points.some((p) => p.off < 0) ? "Hollow, at 0: not above 0. " : "",
    "A click, a tap, or Enter selects a model.",
    view.labels === "yes" ? " Labels stand where there is room." : "",
  ].join("");
}

function scatterSection() {
  const controls = h("div", { class: "controls" }),
    buttons = h("div", {}),
    place = h("div", { class: "chart" });
  const again = drawn(place, scatterDrawing),
    pick = (key) => (value) => {
      view[key] = value;
      if (key === "y") view.yScale = usualScale(value);
      changed();
    };
  const measures = Object.entries(MEASURES)
    .filter(([key, each]) => key === "ppl" || MEASURED.some((m) => !m.isReference && known(each.of(m).value)))
    .map(([key, each]) => [key, each.name]);
  const both = [
    ["linear", "linear"],
    ["log", "log"],
  ];
  const legend = () => [
    ...GROUPS.filter((group) => !state.hidden.has(group)).map((group) => [
      buttons.querySelector(`[data-group="${CSS.escape(group)}"] svg`),
      group,
    ]),
    ...(view.labels === "yes" ? [[null, "bold: no other row shown is smaller and better"]] : []),
  ];
  byId("scatter").append(controls, buttons, place, saveButtons(place, "Quality over size", legend));
  onChange(() => {
    const y = choice("y", measures, view.y, pick("y")),
      x = choice(
        "x",
        Object.entries(SIZES)
          .filter(([key]) => key === "bpw" || MEASURED.some((each) => known(each[key])))
          .map(([key, each]) => [key, each.name]),
        view.x,
        pick("x"),
      );
    controls.replaceChildren(
      y,
      choice("y scale", both, view.yScale, pick("yScale")),
      x,
      choice("x scale", both, view.xScale, pick("xScale")),
      choice(
        "labels",
        [
          ["yes", "on"],
          ["no", "off"],
        ],
        view.labels,
        pick("labels"),
      ),
    );
    buttons.replaceChildren(groupButtons("scatter"));
    again();
  });
}
