// The curve over positions in the window.
const CURVED = MEASURED.filter((each) => each.curve);
const CURVES = {
  loss: { name: "loss", axis: "loss / nats", of: (m) => m.curve.nll },
  more: {
    name: "loss − reference",
    axis: "loss − reference's / nats",
    of: (m) =>
      m.curve.nll.map((v, i) => (known(v) && known(REFERENCE.curve.nll[i]) ? v - REFERENCE.curve.nll[i] : null)),
  },
  kld: { name: "KLD", axis: "KL divergence / nats", of: (m) => m.curve.kld || m.curve.nll.map(() => null) },
};
const CURVE_KINDS = Object.keys(CURVES).filter(
  (key) => key === "loss" || (key === "more" ? REFERENCE && REFERENCE.curve : CURVED.some((m) => m.curve.kld)),
);
// A token with fewer tokens before it is mostly guessed: its loss says little of a model, and stretches the axis.
const CONTEXT = 32;
const SPAN = 2; // bins on either side that a point of a line is the mean of
let curveFrom = CONTEXT;
// The first bin that is drawn: of the first scored position, or with enough context, if three bins have it.
function firstBin(edges) {
  const at = edges.findIndex((edge) => edge >= curveFrom);
  return at < 0 || at > edges.length - 4 ? 0 : at;
}
// From the first bin on: means over a bin and those beside it, weighted by the positions that they hold and by how near
// they are.
function smoothed(values, edges, first) {
  return values.map((value, i) => {
    if (!known(value) || i < first) return null;
    const span = Math.min(SPAN, i - first, values.length - 1 - i); // as many on both sides, and none that is not drawn
    let total = 0,
      weight = 0;
    for (let j = i - span; j <= i + span; j++)
      if (known(values[j])) {
        const share = (edges[j + 1] - edges[j]) * (span + 1 - Math.abs(i - j));
        total += share * values[j];
        weight += share;
      }
    return total / weight;
  });
}
let curveKind = CURVE_KINDS.includes("more") ? "more" : "loss";
function curveDrawing(width) {
  const of = CURVES[curveKind].of,
    models = chosenModels().filter((each) => each.curve);
  if (curveKind === "loss" && CURVED.includes(REFERENCE) && visible(REFERENCE) && !models.includes(REFERENCE))
    models.unshift(REFERENCE);
  if (!models.length) return [h("p", { class: "hint" }, "Select models in the table to draw them here.")];
  const edges = models[0].curve.edges,
    first = firstBin(edges),
    lines = models.map((each) => smoothed(of(each), edges, first)),
    values = lines.flat().filter(known);
  if (!values.length) return [h("p", { class: "hint" }, "Select models in the table to draw them here.")];
  const last = edges.length - 1,
    y = limits(values, "linear", curveKind === "kld");
  const axes = frame(
    width,
    Math.round(Math.min(Math.max(width * 0.36, 280), 400)),
    { kind: "log", low: Math.max(edges[first], 1), high: edges[last], name: "position in the window / tokens" },
    { ...y, name: CURVES[curveKind].axis },
    "Score over position in the window",
  );
  // The middle of a bin's first and last position on a logarithmic axis: eval/plots/curves.py
  const middle = (i) => Math.sqrt(Math.max(edges[i], 1) * Math.max(edges[i + 1] - 1, 1)),
    line = svg("line", { class: "cursor", y1: axes.box.top, y2: axes.box.bottom, visibility: "hidden" });
  if (y.low < 0 && y.high > 0)
    axes.root.append(
      svg("line", { class: "level", x1: axes.box.left, x2: axes.box.right, y1: axes.toY(0), y2: axes.toY(0) }),
    );
  models.forEach((each, k) => {
    let path = "",
      open = false;
    lines[k].forEach((value, i) => {
      if (known(value)) path += `${open ? "L" : "M"}${axes.toX(middle(i))},${axes.toY(value)}`;
      open = known(value);
    });
    axes.root.append(
      svg("path", {
        class: "curve",
        d: path,
        stroke: colourOf(each.group),
        "stroke-dasharray": dashOf(each),
        "data-model": each.id,
      }),
    );
  });
  let at = first;
  const place = () => {
    const box = axes.root.getBoundingClientRect(),
      x = box.left + axes.toX(middle(at)),
      ys = lines.map((line) => axes.toY(line[at] ?? y.low));
    return { left: x, right: x, top: box.top + Math.min(...ys), bottom: box.top + Math.max(...ys) };
  };
  const point = (i) => {
    at = Math.min(Math.max(i, first), last - 1);
    const x = axes.toX(middle(at));
    dress(line, { x1: x, x2: x, visibility: "visible" }, []);
    const span = edges[at + 1] - 1 > edges[at] ? `${edges[at]} to ${edges[at + 1] - 1}` : `${edges[at]}`;
    showTip(
      `position ${span}`,
      models.map((each) => [each.label, known(of(each)[at]) ? short(of(each)[at], 4) : NA]),
      place,
    );
  };
  const leave = () => (line.setAttribute("visibility", "hidden"), hideTip(place));
  const near = (event) => {
    const x = event.clientX - axes.root.getBoundingClientRect().left,
      away = edges.slice(0, -1).map((_, i) => (i < first ? Infinity : Math.abs(axes.toX(middle(i)) - x)));
    point(away.indexOf(Math.min(...away)));
  };
  dress(
    axes.root,
    {
      tabindex: "0",
      "data-key": "curve",
      onpointermove: near,
      onpointerdown: near, // a finger that taps does not move
      onpointerleave: (event) => event.pointerType !== "touch" && leave(),
      onblur: leave,
      onkeydown: (event) =>
        ["ArrowLeft", "ArrowRight"].includes(event.key) &&
        (event.preventDefault(), point(at + (event.key === "ArrowLeft" ? -1 : 1))),
    },
    [line],
  );
  return [
    axes.root,
    h(
      "ul",
      { class: "legend" },
      models.map((each) => h("li", {}, swatch(each.group, dashOf(each)), each.label)),
    ),
  ];
}

function positionSection() {
  const section = byId("position"),
    controls = h("div", { class: "controls" }),
    place = h("div", { class: "chart" });
  section.hidden = !CURVED.length;
  section.dataset.short = "Position";
  if (section.hidden) return;
  const options = CURVE_KINDS.map((key) => [key, CURVES[key].name]);
  const hint = h("p", { class: "hint" }),
    { edges } = CURVED[0].curve,
    starts = [CONTEXT, 1].map((from) => ((curveFrom = from), edges[firstBin(edges)])); // the last: the first scored position
  section.append(controls, place, saveButtons(place, "Position in the window", legendOf(place)), hint);
  curveFrom = CONTEXT;
  const again = drawn(place, curveDrawing);
  onChange(() => {
    controls.replaceChildren(
      options.length > 1 ? choice("curve", options, curveKind, (value) => ((curveKind = value), changed())) : "",
      starts[0] > starts[1]
        ? choice(
            "from position",
            starts.map((start, i) => [String([CONTEXT, 1][i]), String(start)]),
            String(curveFrom),
            (value) => ((curveFrom = Number(value)), changed()),
          )
        : "",
    );
    hint.textContent =
      "Means over the tokens at each position of their windows, in bins that widen with the position: how a model gains from context. " +
      `Lines begin at position ${edges[firstBin(edges)]}${starts[0] > starts[1] && curveFrom > 1 ? `, as tokens with less before them are mostly guessed (scored from position ${starts[1]} on)` : ""}, and are smoothed: ` +
      `each point is a mean over up to ${2 * SPAN + 1} bins, near bins and bins of more positions counting more. Pointer or arrow keys show the numbers of a bin, not smoothed.`;
    again();
  });
}
