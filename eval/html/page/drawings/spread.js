// Histograms of KLD over tokens.
const SPREAD = COMPARED.filter((each) => each.histogram);
function bins(each) {
  const { counts, below, above } = each.histogram,
    all = below + above + sum(counts);
  return { share: counts.map((n) => n / all), below: below / all, above: above / all };
}
const edge = (each, i) => 10 ** (each.histogram.first + i / each.histogram.per_decade);

// The decades in which some model has a bin with more than 0.1 % of its tokens.
function spreadLimits(models) {
  const used = models.flatMap((each) =>
    bins(each)
      .share.map((share, i) => (share > 1e-3 ? i : -1))
      .filter((i) => i >= 0),
  );
  const per = models[0].histogram.per_decade,
    low = Math.floor(Math.min(...used) / per),
    high = Math.ceil((Math.max(...used) + 1) / per);
  return used.length
    ? [10 ** (models[0].histogram.first + low), 10 ** (models[0].histogram.first + high)]
    : [1e-8, 100];
}
function steps(each, toX, toY, [low, high]) {
  const parts = [];
  bins(each).share.forEach((share, i) => {
    if (edge(each, i) >= low * 0.999 && edge(each, i + 1) <= high * 1.001)
      parts.push(`${toX(edge(each, i))},${toY(share)}`, `${toX(edge(each, i + 1))},${toY(share)}`);
  });
  return parts.length ? `M${parts[0].split(",")[0]},${toY(0)}L${parts.join("L")}V${toY(0)}` : "";
}
function height(each, value) {
  const i = Math.floor((Math.log10(value) - each.histogram.first) * each.histogram.per_decade + 1e-9);
  return bins(each).share[i] || 0;
}

function histogramDrawing(width) {
  const models = chosenModels().filter((each) => each.histogram);
  if (!models.length)
    return [h("p", { class: "hint" }, "Select models in the table to lay their histograms over each other.")];
  const range = spreadLimits(models),
    top = Math.max(...models.flatMap((each) => bins(each).share));
  const axes = frame(
    width,
    Math.round(Math.min(Math.max(width * 0.36, 280), 400)),
    { kind: "log", low: range[0], high: range[1], name: "KLD of a token / nats" },
    { kind: "linear", low: 0, high: top * 108, name: "% of tokens" },
    "Histograms of KLD",
  );
  const toY = (share) => axes.toY(100 * share);
  for (const each of models) {
    const colour = colourOf(each.group),
      mark = (key, kind) => {
        const value = each.percentiles[key];
        if (!(value > range[0] && value < range[1])) return;
        const x = axes.toX(value),
          y = toY(height(each, value));
        axes.root.append(
          svg("line", {
            x1: x,
            x2: x,
            y1: axes.box.bottom,
            y2: y,
            stroke: colour,
            "stroke-width": 1.2,
            "stroke-dasharray": key === "99" ? "2 2" : null,
          }),
        );
        axes.root.append(
          explain(
            svg("path", {
              d: shape(kind, x, y, 4),
              fill: colour,
              class: "mark",
              tabindex: "0",
              role: "img",
              "aria-label": `${each.label} ${key === "99" ? "p99" : "median"}`,
            }),
            each.label,
            modelRows(each),
          ),
        );
      };
    axes.root.append(
      svg("path", {
        class: "fill",
        d: steps(each, axes.toX, toY, range),
        fill: colour,
        stroke: colour,
        "stroke-dasharray": dashOf(each),
      }),
    );
    mark("50", "o");
    mark("99", "D");
  }
  const legend = models.map((each) =>
    h(
      "li",
      {},
      swatch(each.group, dashOf(each)),
      `${each.label}: median ${short(each.percentiles["50"])}, p99 ${short(each.percentiles["99"])}, max ${short(each.percentiles.max)}` +
        (bins(each).below > 0.0005 ? `; ${percent(bins(each).below)} below ${tickText(edge(each, 0), [1e-8])}` : ""),
    ),
  );
  return [axes.root, h("ul", { class: "legend" }, legend)];
}

function smallHistogram(each, range, top) {
  const width = 170,
    tall = 64,
    toX = scale("log", ...range, 0, width),
    toY = scale("linear", 0, top * 1.05, tall, 2),
    parts = [];
  const colour = colourOf(each.group);
  parts.push(svg("path", { class: "fill strong", d: steps(each, toX, toY, range), fill: colour, stroke: colour }));
  for (const [key, dash] of [
    ["50", null],
    ["99", "2 2"],
  ]) {
    const value = each.percentiles[key];
    if (value > range[0] && value < range[1])
      parts.push(
        svg("line", { class: "cut", x1: toX(value), x2: toX(value), y1: 2, y2: tall, "stroke-dasharray": dash }),
      );
  }
  const chosen = state.chosen.includes(each.id);
  const node = h(
    "button",
    {
      type: "button",
      class: "small",
      "aria-pressed": String(chosen),
      "data-key": `small-${each.id}`,
      onclick: () => toggleModel(each.id),
    },
    h("span", {}, each.label),
    svg(
      "svg",
      { viewBox: `0 0 ${width} ${tall + 1}`, "aria-hidden": "true" },
      parts,
      svg("line", { class: "axis", x1: 0, x2: width, y1: tall, y2: tall }),
    ),
  );
  return explain(node, each.label, modelRows(each));
}

function spreadSection() {
  const section = byId("spread"),
    place = h("div", { class: "chart" }),
    small = h("div", { class: "multiples" });
  section.hidden = !SPREAD.length;
  section.dataset.short = "Spread";
  if (section.hidden) return;
  const caption = h("p", { class: "hint" });
  section.append(
    h("p", { class: "hint" }, "The selected models. Circle: median; diamond: 99 % of the tokens have a smaller KLD."),
    place,
    saveButtons(place, "Spread of KLD over tokens", legendOf(place)),
    h("h3", {}, "All models"),
    small,
    caption,
  );
  const again = drawn(place, histogramDrawing);
  onChange(() => {
    again();
    const models = SPREAD.filter(visible);
    if (!models.length) return small.replaceChildren();
    const range = spreadLimits(models),
      top = Math.max(...models.flatMap((each) => bins(each).share));
    small.replaceChildren(...models.map((each) => smallHistogram(each, range, top)));
    caption.textContent = `Each from ${tickText(range[0], range)} to ${tickText(range[1], range)} nats, on one scale of heights. Line: median; dashed: p99.`;
  });
}
