// KLD by the reference's confidence: a drawing of the selected models, and all in a table.
const CONFIDENT = COMPARED.filter((each) => each.confidence.length);
function confidenceDrawing(width) {
  const models = chosenModels().filter((each) => each.confidence.length),
    klds = models.flatMap((each) => each.confidence.map((bucket) => bucket.kld)).filter((kld) => kld.value > 0);
  if (!klds.length) return [h("p", { class: "hint" }, "Select models in the table to draw them here.")];
  const least = Math.min(...klds.map((kld) => kld.value)) / 2, // a bar may reach down to 0
    ends = ({ value, stderr }) => [Math.max(value - (stderr || 0), least), value + (stderr || 0)];
  const buckets = models[0].confidence,
    y = limits(klds.flatMap(ends), "log", false);
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
    const spots = each.confidence
      .map((bucket, i) => ({
        bucket,
        x: axes.box.left + (i + 0.5 + (k - (models.length - 1) / 2) * Math.min(0.06, 0.6 / models.length)) * slot,
      }))
      .filter(({ bucket }) => bucket.kld.value > 0);
    const colour = colourOf(each.group),
      at = axes.toY;
    axes.root.append(
      svg("path", {
        class: "curve",
        stroke: colour,
        "stroke-dasharray": dashOf(each),
        d: `M${spots.map(({ bucket, x }) => `${x},${at(bucket.kld.value)}`).join("L")}`,
      }),
    );
    for (const { bucket, x } of spots) {
      const [low, high] = ends(bucket.kld);
      axes.root.append(
        svg("path", {
          class: "bar",
          stroke: colour,
          "data-bar": each.id,
          d: `M${x},${at(high)}V${at(low)}`,
        }),
      );
      axes.root.append(
        explain(
          svg("path", {
            d: shape(PAYLOAD.styles[each.group][1], x, at(bucket.kld.value), 5),
            class: "mark",
            fill: colour,
            tabindex: "0",
            role: "img",
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
  const models = sorted(CONFIDENT.filter(visible));
  if (!models.length) return [];
  const heads = models[0].confidence.map((b) =>
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
      h("th", { scope: "row" }, h("span", { class: "label" }, swatch(m.group), h("span", {}, m.label))),
      m.confidence.map((b) => h("td", { class: "number" }, fixed(b.kld.value, 5))),
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
  section.hidden = !CONFIDENT.length;
  section.dataset.short = "Confidence";
  if (section.hidden) return;
  section.append(
    h(
      "p",
      { class: "hint" },
      "Tokens by how sure the reference is of what comes next: the largest probability that it gives to any token. Selected models" +
        (CONFIDENT.some((m) => m.confidence.some((b) => known(b.kld.stderr))) ? "; bars: ± one standard error." : "."),
    ),
    place,
    saveButtons(place, "KLD by the reference's confidence", legendOf(place)),
    rows,
  );
  const again = drawn(place, confidenceDrawing);
  onChange(() => {
    again();
    rows.replaceChildren(...confidenceTable());
  });
}
