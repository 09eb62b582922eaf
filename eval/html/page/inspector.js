// The text's tokens, coloured by what they cost the current model, and the tokens that suffered most.
const PAINTS = {
  kld: {
    name: "KLD",
    text: "KLD, from 0.001 (no colour) to 10 nats, by its logarithm",
    of: (p, id, i) => p.kld[id] && p.kld[id][i],
    strength: (v) => (v > 0 ? (Math.log10(v) + 3) / 4 : 0),
  },
  more: {
    name: "loss − reference",
    text: "loss minus the reference's, from 0 to 6 nats; blue: the model gives the token more than the reference does",
    of: (p, id, i) =>
      p.logprob[id] && p.ref_logprob && known(p.ref_logprob[i]) && known(p.logprob[id][i])
        ? p.ref_logprob[i] - p.logprob[id][i]
        : null,
    strength: (v) => Math.sqrt(Math.abs(v) / 6),
  },
  loss: {
    name: "loss",
    text: "loss, from 0 to 12 nats",
    of: (p, id, i) => (p.logprob[id] && known(p.logprob[id][i]) ? -p.logprob[id][i] : null),
    strength: (v) => v / 12,
  },
};
const inspecting = { paint: "kld" };
function probability(logprob) {
  const p = Math.exp(logprob);
  return !known(logprob) ? NA : p > 0.9995 ? "> 99.9 %" : percent(p, p >= 0.1 ? 1 : decimals(100 * p, 2));
}
const visibleText = (text, end = "↵\n") => (text === "" ? "▯" : text.replace(/\n/g, end));

function tokenRows(p, id, i) {
  const own = p.logprob[id] ? p.logprob[id][i] : null,
    ref = p.ref_logprob ? p.ref_logprob[i] : null,
    kld = p.kld[id] ? p.kld[id][i] : null;
  const rows = [["logprob", `${short(own, 3)} (${probability(own)})`]];
  if (p.ref_logprob) rows.push(["reference's", `${short(ref, 3)} (${probability(ref)})`]);
  if (p.kld[id]) rows.push(["KLD", short(kld, 3)]);
  return [...rows, ["position", `${p.position + i} of window ${p.window + 1}`]];
}
function passage(p, id) {
  const paint = PAINTS[inspecting.paint];
  const cells = p.tokens.map((text, i) => {
    const value = paint.of(p, id, i),
      strength = known(value) ? Math.min(Math.max(paint.strength(value), 0), 1) : 0;
    const cell = h(
      "span",
      {
        class: known(value) && value < 0 ? "token gain" : "token",
        role: "listitem",
        style: { "--strength": strength.toFixed(3) },
      },
      visibleText(text),
    );
    return explain(cell, JSON.stringify(text), tokenRows(p, id, i));
  });
  const text = h(
    "div",
    { class: "passage", role: "list", "aria-label": `Window ${p.window + 1}, from position ${p.position}` },
    cells,
  );
  roving(text, cells, 10);
  return h(
    "figure",
    {},
    h("figcaption", {}, `Window ${p.window + 1}, positions ${p.position} to ${p.position + p.tokens.length - 1}`),
    text,
  );
}
function sufferers(id) {
  const rows = INSPECTION.worst[id] || [],
    byKld = rows.some((each) => known(each.kld)),
    refs = rows.some((each) => known(each.ref_logprob));
  const row = (each) =>
    h(
      "tr",
      {},
      h("td", { class: "number" }, short(byKld ? each.kld : -each.logprob, 3)),
      refs ? h("td", { class: "number" }, probability(each.ref_logprob)) : null,
      h("td", { class: "number" }, probability(each.logprob)),
      h(
        "td",
        { class: "context" },
        h("span", { class: "around" }, each.before.replace(/\n/g, "↵")),
        h("mark", {}, visibleText(each.token, "↵")),
        h("span", { class: "around" }, each.after.replace(/\n/g, "↵")),
      ),
    );
  const heads = [byKld ? "KLD" : "loss", ...(refs ? ["reference"] : []), "model"].map((text) =>
    h("th", { scope: "col", class: "number" }, text),
  );
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { id: "worst" },
      h("thead", {}, h("tr", {}, heads, h("th", { scope: "col" }, "token and what is around it"))),
      h("tbody", {}, rows.map(row)),
    ),
  );
}

function tokensSection() {
  const section = byId("tokens"),
    body = h("div", {});
  section.hidden = !INSPECTION || !INSPECTION.worst.some(Boolean);
  if (section.hidden) return;
  const models = MODELS.filter((each) => INSPECTION.worst[each.id]),
    without = MEASURED.filter((each) => !INSPECTION.worst[each.id]).map((each) => each.label);
  section.append(body);
  if (RUN.parts && without.length)
    section.append(
      h("p", { class: "hint" }, `Not here, as no report with excerpts was given for their run: ${without.join(", ")}.`),
    );
  onChange(() => {
    const each = models.find((m) => m.id === state.current) || models[0],
      passages = INSPECTION.passages.filter((p) => p.logprob[each.id]),
      first = passages.some((p) => p.kld[each.id]);
    const paints = Object.entries(PAINTS).filter(
      ([key]) => key === "loss" || (key === "kld" ? first : passages.some((p) => p.ref_logprob)),
    );
    if (!paints.some(([key]) => key === inspecting.paint)) inspecting.paint = paints[0][0];
    body.replaceChildren(
      h(
        "div",
        { class: "controls" },
        modelSelect("Model", each.id, models, makeCurrent),
        choice(
          "colour",
          paints.map(([key, paint]) => [key, paint.name]),
          inspecting.paint,
          (value) => ((inspecting.paint = value), changed()),
        ),
      ),
      h(
        "p",
        { class: "hint" },
        h("span", { class: "ramp", "aria-hidden": "true" }),
        `Colour: ${PAINTS[inspecting.paint].text}. Excerpts of the text: its beginning, and where the models, each by its own average, lost most. Pointer or arrow keys show a token's numbers; ▯ begins a character that the next token ends.`,
      ),
      passages
        .map((p) => passage(p, each.id))
        .reduce((all, one) => (all.append(one), all), h("div", { class: "passages" })),
      h("h3", {}, "Tokens that suffered most"),
      h(
        "p",
        { class: "hint" },
        `The largest ${first ? "KLD" : "losses"} of ${each.label}; the probabilities are of the text's own token.`,
      ),
      sufferers(each.id),
    );
  });
}
