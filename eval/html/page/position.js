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
let curveKind = CURVE_KINDS.includes("more") ? "more" : "loss";
function curveDrawing(width) {
  const of = CURVES[curveKind].of,
    models = chosenModels().filter((each) => each.curve);
  if (curveKind === "loss" && CURVED.includes(REFERENCE) && visible(REFERENCE) && !models.includes(REFERENCE))
    models.unshift(REFERENCE);
  const values = models.flatMap((each) => of(each).filter(known));
  if (!values.length) return [h("p", { class: "hint" }, "Select models in the table to draw them here.")];
  const edges = models[0].curve.edges,
    last = edges.length - 1,
    y = limits(values, "linear", curveKind === "kld");
  const axes = frame(
    width,
    Math.round(Math.min(Math.max(width * 0.36, 280), 400)),
    { kind: "log", low: Math.max(edges[0], 1), high: edges[last], name: "position in the window / tokens" },
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
  for (const each of models) {
    let path = "",
      open = false;
    of(each).forEach((value, i) => {
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
  }
  let at = 0;
  const point = (i) => {
    at = Math.min(Math.max(i, 0), last - 1);
    const x = axes.toX(middle(at));
    dress(line, { x1: x, x2: x, visibility: "visible" }, []);
    const span = edges[at + 1] - 1 > edges[at] ? `${edges[at]} to ${edges[at + 1] - 1}` : `${edges[at]}`;
    showTip(
      `position ${span}`,
      models.map((each) => [each.label, known(of(each)[at]) ? short(of(each)[at], 4) : NA]),
      () => {
        const box = axes.root.getBoundingClientRect();
        return { left: box.left + x, right: box.left + x, top: box.top + 30, bottom: box.top + 60 };
      },
    );
  };
  const leave = () => (line.setAttribute("visibility", "hidden"), hideTip());
  dress(
    axes.root,
    {
      tabindex: "0",
      "data-key": "curve",
      onpointermove: (event) => {
        const x = event.clientX - axes.root.getBoundingClientRect().left,
          near = edges.slice(0, -1).map((_, i) => Math.abs(axes.toX(middle(i)) - x));
        point(near.indexOf(Math.min(...near)));
      },
      onpointerleave: leave,
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
  section.append(
    controls,
    place,
    h(
      "p",
      { class: "hint" },
      "Means over the tokens at each position of their windows: how a model gains from context. Pointer or arrow keys show the numbers.",
    ),
  );
  const again = drawn(place, curveDrawing);
  onChange(() => {
    controls.replaceChildren(
      options.length > 1 ? choice("curve", options, curveKind, (value) => ((curveKind = value), changed())) : "",
    );
    again();
  });
}
