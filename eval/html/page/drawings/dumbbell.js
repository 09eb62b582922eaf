// The drawing of all texts: a row a model, on it a marker a text with its 95 % interval, a bar from least to largest.
const DUMBBELL = { row: 34, top: 30, bottom: 48, apart: 4.5, size: 80, means: 78, wide: 560 }; // pixels
const LOGARITHMIC = { kld: PAYLOAD.rule.wide, ppl: 3 }; // so many times the smallest the largest value is: eval/plots/texts/dumbbell.py

function dumbbellAxis({ key, rows }) {
  const spots = rows.flatMap((row) => row.spots),
    values = spots.map((spot) => spot.value).filter((value) => value > 0),
    ends = spots.flatMap((spot) => [spot.value, ...(spot.limits || [])]);
  const [least, most] = [Math.min(...values), Math.max(...ends)];
  if (values.length && Math.max(...values) > (LOGARITHMIC[key] || Infinity) * least) {
    const low = Math.max(Math.min(...ends.filter((end) => end > 0)), least / 2); // an interval may reach down to 0
    return { kind: "log", low: low / 1.2, high: most * 1.2 };
  }
  const low = key === "kld" ? Math.min(0, ...ends) : Math.min(...ends),
    room = 0.04 * (most - low || 1);
  return { kind: "linear", low: low - room, high: most + room };
}
// A text of at most that many pixels, cut in its middle, as models differ in the last words.
function fitted(text, room) {
  const cut = (kept) => `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
  let kept = text.length,
    shown = text;
  while (kept > 4 && 1.08 * textWidth(shown) > room) shown = cut(--kept);
  return shown;
}
function textLook(t) {
  const [colour, marker] = OVERVIEW.styles[TEXTS[t].name];
  return { colour: colour || "currentColor", marker };
}
function textSwatch(t) {
  const { colour, marker } = textLook(t),
    sign = svg("path", { d: shape(marker, 7, 7, 5), fill: colour, class: "mark" });
  return svg("svg", { width: 14, height: 14, "aria-hidden": "true", class: "swatch" }, sign);
}

function dumbbellFrame(width, box, axis, toX, name) {
  const height = box.bottom + DUMBBELL.bottom,
    across = ticks(axis.kind, axis.low, axis.high, (box.right - box.left) / 80),
    root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": name });
  let last = -Infinity;
  for (const each of across) {
    const at = toX(each),
      text = tickText(each, across);
    root.append(svg("line", { class: "grid", x1: at, x2: at, y1: box.top, y2: box.bottom }));
    if (at - last < 7 * text.length + 6) continue;
    root.append(svg("text", { class: "tick", x: at, y: box.bottom + 18, "text-anchor": "middle" }, text));
    last = at;
  }
  const middle = { class: "name", x: (box.left + box.right) / 2, y: height - 8, "text-anchor": "middle" };
  root.append(
    svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    svg("text", middle, fitted(name, 2 * Math.min(middle.x, width - middle.x) - 10)),
  );
  return root;
}
function dumbbellSpot(drawing, row, spot, at, y) {
  const { colour, marker } = textLook(spot.text),
    text = TEXTS[spot.text].name,
    hollow = spot.value <= 0;
  const rows = [
    [drawing.name, known(spot.error) ? plusMinus({ value: spot.value, stderr: spot.error }) : spot.shown],
    ["95 %", spot.limits ? spot.limits.map((end) => short(end, 3)).join(" to ") : NA],
    ["mean of the texts", row.shown],
    ["size", row.size || NA],
  ];
  const words = { tabindex: "0", role: "img", "aria-label": `${row.label} on ${text}: ${spot.shown}` },
    look = { class: hollow ? "mark hollow" : "mark", fill: colour, style: hollow ? { stroke: colour } : {} };
  const sign = svg("path", { d: shape(marker, at(spot.value), y, 5.5), "data-spot": `${row.label}/${text}`, ...words, ...look }),
    [low, high] = (spot.limits || []).map(at),
    whisker = { class: "bar", stroke: colour, d: `M${low},${y}H${high}M${low},${y - 3}v6M${high},${y - 3}v6` };
  return [spot.limits ? svg("path", whisker) : null, explain(sign, `${row.label}: ${text}`, rows)];
}
// The label and the size of a row, the size below the label where there is little room, and its mean at the right.
function dumbbellWords(row, y, box) {
  const right = { "text-anchor": "end" };
  return [
    svg("text", { x: box.name, y: box.stacked ? y - 2 : y + 4, ...right }, fitted(row.label, box.name - 4)),
    svg("text", { class: "tick", x: box.left - 8, y: box.stacked ? y + 12 : y + 4, ...right }, row.size),
    box.means ? svg("text", { x: box.means, y: y + 4, ...right }, row.shown) : null,
  ];
}
function dumbbellRow(drawing, row, i, box, at) {
  const y = box.top + (i + 0.5) * DUMBBELL.row,
    values = row.spots.map((spot) => at(spot.value)),
    step = Math.min(DUMBBELL.apart, 15 / Math.max(TEXTS.length - 1, 1)),
    height = (spot) => y + step * (spot.text - (TEXTS.length - 1) / 2),
    mean = row.mean.value,
    x = known(mean) && mean > drawing.axis.low ? at(mean) : null;
  return [
    ...dumbbellWords(row, y, box),
    svg("line", { class: "range", x1: Math.min(...values), x2: Math.max(...values), y1: y, y2: y }),
    x === null ? null : svg("line", { class: "mean", x1: x, x2: x, y1: y - 12, y2: y + 12 }),
    ...row.spots.flatMap((spot) => dumbbellSpot(drawing, row, spot, at, height(spot))),
  ].filter(Boolean);
}
function dumbbellFloor([label, value], box, at) {
  const x = at(value),
    right = x > (box.left + box.right) / 2,
    words = fitted(`noise floor: ${label}`, (box.right - box.left) / 2);
  return [
    svg("line", { class: "level floor", x1: x, x2: x, y1: box.top - 18, y2: box.bottom }),
    svg("text", { class: "level-name", x: right ? x - 5 : x + 5, y: box.top - 10, "text-anchor": right ? "end" : "start" }, words),
  ];
}
function dumbbellBox(width, rows) {
  const widest = 1.08 * Math.max(...rows.map((row) => textWidth(row.label))) + 12,
    stacked = width < DUMBBELL.wide,
    means = !stacked && rows.some((row) => known(row.mean.value));
  const left = Math.min(stacked ? Math.max(widest, DUMBBELL.size) : widest + DUMBBELL.size, 0.42 * width);
  return {
    left,
    stacked,
    name: stacked ? left - 8 : left - DUMBBELL.size,
    right: width - (means ? DUMBBELL.means + 14 : 14),
    means: means ? width - 8 : null,
    top: DUMBBELL.top,
    bottom: DUMBBELL.top + rows.length * DUMBBELL.row,
  };
}
function dumbbellDrawing(width, found) {
  const drawing = { ...found, axis: dumbbellAxis(found) },
    { rows, floor, axis } = drawing,
    box = dumbbellBox(width, rows);
  const toX = scale(axis.kind, axis.low, axis.high, box.left, box.right),
    at = (value) => Math.min(Math.max(toX(Math.max(value, axis.low)), box.left), box.right);
  const root = dumbbellFrame(width, box, axis, toX, found.axis);
  if (box.means) root.append(svg("text", { class: "tick", x: box.means, y: box.top - 10, "text-anchor": "end" }, "mean"));
  root.append(...rows.flatMap((row, i) => dumbbellRow(drawing, row, i, box, at)));
  if (floor && floor[1] > axis.low && floor[1] < axis.high) root.append(...dumbbellFloor(floor, box, at));
  const shown = TEXTS.map((_, t) => t).filter((t) => rows.some((row) => row.spots.some((spot) => spot.text === t)));
  const legend = shown.map((t) => h("li", {}, textSwatch(t), TEXTS[t].name));
  return [root, h("ul", { class: "legend" }, legend), h("p", { class: "hint" }, found.caption)];
}
