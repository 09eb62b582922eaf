// Labels of the scatter plot: each takes the first place around its point that touches no point, label or edge, if there
// is one without touching a line; a label without a place is left out. The Pareto front comes first, in bold.
const pen = document.createElement("canvas").getContext("2d");
function textWidth(text, weight = 400) {
  pen.font = `${weight} 11.5px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}
function dotsOfSeries(points) {
  return series(points)
    .flatMap((members) =>
      members.slice(1).flatMap((to, i) => {
        const from = members[i],
          steps = Math.ceil(Math.hypot(to.cx - from.cx, to.cy - from.cy) / 5);
        return Array.from({ length: steps }, (_, k) => [
          from.cx + ((to.cx - from.cx) * k) / steps,
          from.cy + ((to.cy - from.cy) * k) / steps,
        ]);
      }),
    )
    .map(([x, y]) => [x - 1, y - 1, x + 1, y + 1]);
}
function leader(p, box) {
  return {
    x1: p.cx,
    y1: p.cy,
    x2: Math.min(Math.max(p.cx, box[0]), box[2]),
    y2: Math.min(Math.max(p.cy, box[1]), box[3]),
  };
}
// A place farther from the point, such that the leader passes through no point and no label.
function fartherPlace(p, width, height, half, clear, others, hit) {
  for (const reach of [14, 26, 40, 56])
    for (let k = 0; k < 16; k++) {
      const angle = (k * Math.PI) / 8,
        x = p.cx + Math.cos(angle) * (half + reach + width / 2),
        y = p.cy + Math.sin(angle) * (half + reach);
      const box = [x - width / 2, y - height / 2, x + width / 2, y + height / 2],
        to = leader(p, box);
      const path = Array.from({ length: 20 }, (_, i) => [
        to.x1 + ((to.x2 - to.x1) * i) / 19,
        to.y1 + ((to.y2 - to.y1) * i) / 19,
      ]);
      if (clear(box) && !path.some(([a, b]) => others.some((other) => hit([a, b, a + 0.1, b + 0.1], other))))
        return box;
    }
  return undefined;
}
function scatterLabels(points, axes, taken, across, best) {
  const half = (p) => (state.chosen.includes(p.m.id) ? 10.5 : 7) + 2.2 * Math.min(p.covering, 4),
    spots = points.map((p) => [p.cx - half(p), p.cy - half(p), p.cx + half(p), p.cy + half(p)]);
  const boxes = [...taken, ...spots],
    lines = [...dotsOfSeries(points), ...across],
    hit = (box, b) => box[0] < b[2] && b[0] < box[2] && box[1] < b[3] && b[1] < box[3];
  const clear = (box) =>
    box[0] >= axes.box.left &&
    box[2] <= axes.box.right &&
    box[1] >= axes.box.top - 4 &&
    box[3] <= axes.box.bottom &&
    !boxes.some((b) => hit(box, b));
  const found = [];
  const first = (p) => 2 * best.includes(p) + state.chosen.includes(p.m.id);
  for (const p of [...points].sort((a, b) => first(b) - first(a))) {
    const bold = best.includes(p) ? 700 : 400,
      text = p.m.name + (p.off && p.y ? ` (${short(p.y, 3)})` : ""),
      width = textWidth(text, bold) + 4,
      height = 14,
      r = half(p) + 1;
    const places = [
      [r, -7],
      [-r - width, -7],
      [-width / 2, -r - height],
      [-width / 2, r],
      [r - 2, -20],
      [r - 2, 6],
      [2 - r - width, -20],
      [2 - r - width, 6],
    ];
    const free = places.map(([x, y]) => [p.cx + x, p.cy + y, p.cx + x + width, p.cy + y + height]).filter(clear);
    const box =
      free.find((each) => !lines.some((b) => hit(each, b))) ||
      free[0] ||
      fartherPlace(
        p,
        width,
        height,
        half(p),
        clear,
        boxes.filter((b) => b[0] > p.cx || b[2] < p.cx || b[1] > p.cy || b[3] < p.cy),
        hit,
      );
    if (!box) continue;
    boxes.push(box);
    const style = { fill: `color-mix(in srgb, ${colourOf(p.m.group)}, var(--ink))`, "font-weight": bold }; // eval/plots/style.py, ink_of()
    if (!free.length) found.push(svg("line", { class: "leader", ...leader(p, box) }));
    found.push(svg("text", { class: "label", x: box[0] + 2, y: box[3] - 3, "data-label": p.m.id, style }, text));
  }
  return found;
}
