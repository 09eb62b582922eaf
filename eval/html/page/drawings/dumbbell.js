// The drawing of all texts: a row a model, on it a marker a text with its 95 % interval, a bar from least to largest.
const DUMBBELL = { row: 34, top: 30, bottom: 48, apart: 4.5 };
const LOGARITHMIC = { kld: 10, ppl: 3 }; // so many times the smallest the largest value is: eval/plots/texts/plot.py

function dumbbellAxis({ key, rows }) {
  const spots = rows.flatMap((row) => row.spots),
    values = spots.map((spot) => spot.value).filter((value) => value > 0),
    ends = spots.flatMap((spot) => [spot.value, ...(spot.limits || [])]);
  const [least, most] = [Math.min(...values), Math.max(...ends)];
  if (values.length && Math.max(...values) > LOGARITHMIC[key] * least) {
    const low = Math.max(Math.min(...ends.filter((end) => end > 0)), least / 2);
    return { kind: "log", low: low / 1.2, high: most * 1.2 };
  }
  const low = key === "kld" ? Math.min(0, ...ends) : Math.min(...ends),
    room = 0.04 * (most - low || 1);
  return { kind: "linear", low: low - room, high: most + room };
}
// A text of at most that many pixels, cut in its middle, as models differ in the last words.
function fitted(text, room) {
  if (textWidth(text) <= room) return text;
  let kept = text.length;
  while (kept > 4 && textWidth(`${text.slice(0, Math.ceil(kept / 2))}…${text.slice(-Math.floor(kept / 2))}`) > room) kept--;
  return `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(-Math.floor(kept / 2))}`;
}
const textLook = (t) => {
  const [colour, marker] = OVERVIEW.styles[TEXTS[t].name];
  return { colour: colour || "currentColor", marker };
};
function textSwatch(t) {
  const { colour, marker } = textLook(t);
  const sign = svg("path", { d: shape(marker, 7, 7, 5), fill: colour, class: "mark" });
  return svg("svg", { width: 14, height: 14, "aria-hidden": "true", class: "swatch" }, sign);
}

function dumbbellFrame(width, height, box, axis, toX, name) {
  const across = ticks(axis.kind, axis.low, axis.high, (box.right - box.left) / 80),
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
  root.append(
    svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    svg("text", { class: "name", x: (box.left + box.right) / 2, y: height - 8, "text-anchor": "middle" }, fitted(name, width - 20)),
  );
  return root;
}
function dumbbellSpot(drawing, row, spot, at, y) {
  const { colour, marker } = textLook(spot.text),
    text = TEXTS[spot.text].name;
  const whisker = spot.limits && spot.limits.map(at);
  const rows = [
    [drawing.name, spot.shown],
    ["95 %", spot.limits ? spot.limits.map((end) => short(end, 3)).join(" to ") : NA],
    ["mean of the texts", row.shown],
    ["size", row.size || NA],
  ];
  const hollow = spot.value <= 0;
  const sign = svg("path", {
    d: shape(marker, at(spot.value), y, 5.5),
    class: hollow ? "mark hollow" : "mark",
    fill: colour,
    style: hollow ? { stroke: colour } : {},
    tabindex: "0",
    role: "img",
    "data-spot": `${row.label}/${text}`,
    "aria-label": `${row.label} on ${text}: ${spot.shown}`,
  });
  return [
    whisker && svg("path", { class: "bar", stroke: colour, d: `M${whisker[0]},${y}H${whisker[1]}M${whisker[0]},${y - 3}v6M${whisker[1]},${y - 3}v6` }),
    explain(sign, `${row.label}: ${text}`, rows),
  ];
}
function dumbbellRow(drawing, row, i, box, at) {
  const y = box.top + (i + 0.5) * DUMBBELL.row,
    values = row.spots.map((spot) => at(spot.value)),
    step = Math.min(DUMBBELL.apart, 15 / Math.max(TEXTS.length - 1, 1)),
    mean = row.mean.value;
  const over = box.left < 200; // a narrow drawing has the size below the label
  const parts = [
    svg("text", { class: "row-label", x: box.left - 8, y: y + (over ? -2 : 4), "text-anchor": "end" }, fitted(row.label, box.left - (over ? 12 : 82))),
    svg("text", { class: "tick", x: over ? box.left - 8 : 66, y: y + (over ? 12 : 4), "text-anchor": "end" }, row.size),
    svg("line", { class: "range", x1: Math.min(...values), x2: Math.max(...values), y1: y, y2: y }),
    known(mean) && mean > drawing.axis.low ? svg("line", { class: "mean", x1: at(mean), x2: at(mean), y1: y - 12, y2: y + 12 }) : null,
    box.means ? svg("text", { class: "mean-text", x: box.means, y: y + 4, "text-anchor": "end" }, row.shown) : null,
  ];
  return [...parts, ...row.spots.flatMap((spot) => dumbbellSpot(drawing, row, spot, at, y + step * (spot.text - (TEXTS.length - 1) / 2)))].filter(Boolean);
}
function dumbbellDrawing(width, found) {
  const drawing = { ...found, axis: dumbbellAxis(found) },
    { rows, floor, axis } = drawing;
  const widest = Math.max(...rows.map((row) => textWidth(row.label))),
    means = width > 560 && rows.some((row) => known(row.mean.value));
  const left = width > 560 ? Math.max(Math.min(widest + 90, 0.4 * width), 200) : Math.min(Math.max(widest, 60) + 14, 0.4 * width);
  const box = { left, right: width - (means ? 92 : 14), top: DUMBBELL.top, bottom: DUMBBELL.top + rows.length * DUMBBELL.row };
  box.means = means ? width - 8 : null;
  const toX = scale(axis.kind, axis.low, axis.high, box.left, box.right),
    at = (value) => Math.min(Math.max(toX(Math.max(value, axis.low)), box.left), box.right);
  const root = dumbbellFrame(width, box.bottom + DUMBBELL.bottom, box, axis, toX, found.axis);
  if (means) root.append(svg("text", { class: "tick", x: box.means, y: box.top - 10, "text-anchor": "end" }, "mean"));
  root.append(...rows.flatMap((row, i) => dumbbellRow(drawing, row, i, box, at)));
  if (floor && floor[1] > axis.low && floor[1] < axis.high) {
    const x = at(floor[1]),
      right = x > (box.left + box.right) / 2;
    root.append(
      svg("line", { class: "level floor", x1: x, x2: x, y1: box.top - 18, y2: box.bottom }),
      svg("text", { class: "level-name", x: right ? x - 5 : x + 5, y: box.top - 10, "text-anchor": right ? "end" : "start" }, fitted(`noise floor: ${floor[0]}`, (box.right - box.left) / 2)),
    );
  }
  const legend = TEXTS.map((text, t) => [text, t]).filter(([, t]) => rows.some((row) => row.spots.some((spot) => spot.text === t)));
  return [
    root,
    h("ul", { class: "legend" }, legend.map(([text, t]) => h("li", {}, textSwatch(t), text.name))),
    h("p", { class: "hint" }, found.caption),
  ];
}
