// KLD by the reference's confidence: a drawing of the selected models, and all in a table.
function confidenceDrawing(width) {
  const models = chosenModels().filter((each) => each.histogram);
  const values = models.flatMap((each) =>
    each.against.confidence.map((bucket) => bucket.kld.value).filter((v) => v > 0),
  );
  if (!values.length) return [h("p", { class: "hint" }, "Select models in the table to draw them here.")];
  const buckets = models[0].against.confidence,
    y = limits(values, "log", false);
  const axes = frame(
    width,
    300,
    { kind: "linear", low: 100, high: 101, name: "reference's largest probability / %" },
    { ...y, name: "mean KLD / nats" },
    "KLD by the reference's confidence",
  );
  const slot = (axes.box.right - axes.box.left) / buckets.length;
  axes.root
    .querySelectorAll(`.grid[y1="${axes.box.top}"], .tick[y="${axes.box.bottom + 18}"]`)
    .forEach((node) => node.remove());
  buckets.forEach((bucket, i) =>
    axes.root.append(
      svg(
        "text",
        { class: "tick", x: axes.box.left + (i + 0.5) * slot, y: axes.box.bottom + 18, "text-anchor": "middle" },
        `${100 * bucket.low}–${100 * bucket.high}`,
      ),
    ),
  );
  models.forEach((each, k) => {
    const spots = each.against.confidence
      .map((bucket, i) => ({
        bucket,
        x: axes.box.left + (i + 0.5 + (k - (models.length - 1) / 2) * Math.min(0.06, 0.6 / models.length)) * slot,
      }))
      .filter(({ bucket }) => bucket.kld.value > 0);
    const colour = colourOf(each.group),
      at = (value) => axes.toY(Math.max(value, y.low));
    axes.root.append(
      svg("path", {
        class: "series",
        stroke: colour,
        "stroke-dasharray": dashOf(each),
        d: `M${spots.map(({ bucket, x }) => `${x},${at(bucket.kld.value)}`).join("L")}`,
      }),
    );
    for (const { bucket, x } of spots) {
      const e = bucket.kld.stderr || 0;
      axes.root.append(
        svg("path", {
          class: "bar",
          stroke: colour,
          d: `M${x},${at(bucket.kld.value + e)}V${at(bucket.kld.value - e)}`,
        }),
      );
      axes.root.append(
        explain(
          svg("path", {
            d: shape(PAYLOAD.styles[each.group][1], x, at(bucket.kld.value), 5),
            class: "mark",
            fill: colour,
            tabindex: "0",
            "aria-label": `${each.label}: ${plusMinus(bucket.kld)}`,
          }),
          each.label,
          [
            ["reference", `${100 * bucket.low} to ${100 * bucket.high} %`],
            ["tokens", percent(bucket.share)],
            ["mean KLD", plusMinus(bucket.kld)],
            ["median KLD", short(bucket.median)],
          ],
        ),
      );
    }
  });
  return [
    axes.root,
    h(
      "ul",
      { class: "legend" },
      models.map((each) => h("li", {}, swatch(each.group, dashOf(each)), each.label)),
    ),
  ];
}
function confidenceTable() {
  const models = sorted(COMPARED.filter(visible));
  if (!models.length) return [];
  const heads = models[0].against.confidence.map((b) =>
    h(
      "th",
      { scope: "col", class: "number" },
      `${100 * b.low} to ${100 * b.high} %`,
      h("small", {}, `${percent(b.share)} of tokens`),
    ),
  );
  const row = (m) =>
    h(
      "tr",
      { class: state.chosen.includes(m.id) ? "chosen" : null },
      h("th", { scope: "row" }, h("span", { class: "label" }, swatch(m.group), m.label)),
      m.against.confidence.map((b) => h("td", { class: "number" }, fixed(b.kld.value, 5))),
    );
  return [
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "mean KLD / nats"), heads)),
      h("tbody", {}, models.map(row)),
    ),
  ];
}
function confidenceSection() {
  const section = byId("confidence"),
    place = h("div", { class: "chart" }),
    rows = h("div", { class: "scroll" });
  section.hidden = !COMPARED.length;
  section.dataset.short = "Confidence";
  if (section.hidden) return;
  section.append(
    h(
      "p",
      { class: "hint" },
      "Tokens by how sure the reference is of what comes next: the largest probability that it gives to any token. Selected models; bars: ± one standard error.",
    ),
    place,
    rows,
  );
  const again = drawn(place, confidenceDrawing);
  onChange(() => {
    again();
    rows.replaceChildren(...confidenceTable());
  });
}
