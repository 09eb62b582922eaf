// The text's tokens, coloured by what they cost the current model, and the tokens that suffered most.
const lost = (p, id, i) =>
  p.logprob[id] && p.ref_logprob && known(p.ref_logprob[i]) && known(p.logprob[id][i])
    ? p.ref_logprob[i] - p.logprob[id][i]
    : null;
const PAINTS = {
  kld: { name: "KLD", floor: true, of: (p, id, i) => (p.kld[id] ? p.kld[id][i] : null) },
  more: { name: "loss − reference", words: "loss above the reference's", floor: true, of: lost },
  loss: { name: "loss", floor: false, of: (p, id, i) => (p.logprob[id] && known(p.logprob[id][i]) ? -p.logprob[id][i] : null) },
};
const SHARES = [0.5, 0.25, 0.1, 0.05, 0.01]; // of the tokens shown, which have at least the first, second, ... colour
function quantile(values, share) {
  const ranked = [...values].sort((a, b) => a - b);
  return ranked[Math.min(Math.floor(share * ranked.length), ranked.length - 1)];
}
// How tokens are coloured: beyond(p, i), a token's value above the noise floor's at the same token, or the value where
// there is no floor; and the value from which a token has each colour, null for colours within what 99 % of the floor's
// own values stay below: nothing of these can be told from noise.
function colours(paint, id, passages) {
  const all = (of) => passages.flatMap((p) => p.tokens.map((_, i) => of(p, i)).filter(known)),
    floor = paint.floor && FLOOR && FLOOR.id !== id ? all((p, i) => paint.of(p, FLOOR.id, i)) : [];
  const above = floor.length > 0,
    beyond = (p, i) => {
      const value = paint.of(p, id, i),
        base = above ? paint.of(p, FLOOR.id, i) : 0;
      return known(value) && known(base) ? value - base : null;
    };
  const noise = above ? Math.max(quantile(floor.map(Math.abs), 0.99), 0) : 0,
    sizes = all(beyond).map(Math.abs),
    steps = SHARES.map((share) => quantile(sizes, 1 - share)).map((step) => (step > noise ? step : null));
  const stepOf = (value) => (known(value) ? steps.findLastIndex((step) => step !== null && Math.abs(value) >= step) + 1 : 0);
  return { beyond, steps, noise, above, stepOf, tokens: sizes.length };
}
function colourLegend(paint, found) {
  const steps = found.steps
    .map((step, k) => step !== null && h("li", {}, h("span", { class: "token", "data-step": k + 1 }, `≥ ${short(step)}`), `${fixed(100 * SHARES[k], 0)} %`))
    .filter(Boolean);
  const what = found.above
    ? `how far its ${paint.words || paint.name} lies above that of the noise floor (${FLOOR.raw.label}) at the same token, in nats`
    : `its ${paint.words || paint.name} in nats, as the row has it (${!paint.floor ? "a loss has no noise floor" : FLOOR ? "it is the noise floor" : "the run has no noise floor"})`;
  const least = steps.length ? "" : ` No token has a colour: ${found.above ? "nothing here can be told from noise." : "all are 0."}`;
  return [
    h("p", { class: "hint" }, `Colour of a token: ${what}, in quantiles of the ${fixed(found.tokens, 0)} tokens shown (the last colour has 1 % of them).` +
      (found.above ? ` No colour: below ${short(found.noise)} nats, as 99 % of the noise floor's own are, or below the upper half.` : "") + least),
    h("ul", { class: "legend", id: "colours" }, steps, paint.name === PAINTS.more.name && steps.length ? h("li", {}, h("span", { class: "token gain", "data-step": 3 }, "dotted"), "less loss, by as much") : null),
  ];
}
const inspecting = { paint: "kld" };
function probability(logprob) {
  const p = Math.exp(logprob);
  return !known(logprob) ? NA : p < 1e-6 ? "< 0.0001 %" : p > 0.9995 ? "> 99.9 %" : percent(p, p >= 0.1 ? 1 : decimals(100 * p, 2));
}
const visibleText = (text, end = "↵\n") => (text === "" ? "▯" : text.replace(/\n/g, end));

function tokenRows(p, id, i, found) {
  const own = p.logprob[id] ? p.logprob[id][i] : null,
    ref = p.ref_logprob ? p.ref_logprob[i] : null,
    kld = p.kld[id] ? p.kld[id][i] : null;
  const rows = [["logprob", `${short(own, 3)} (${probability(own)})`]];
  if (p.ref_logprob) rows.push(["reference's", `${short(ref, 3)} (${probability(ref)})`]);
  if (p.kld[id]) rows.push(["KLD", short(kld, 3)]);
  if (found.above) rows.push(["above the floor", short(found.beyond(p, i), 3)]);
  return [...rows, ["position", `${p.position + i} of window ${p.window + 1}`]];
}
function passage(p, id, found) {
  const signed = inspecting.paint === "more";
  const cells = p.tokens.map((text, i) => {
    const value = found.beyond(p, i),
      gain = value < 0,
      step = gain && !signed ? 0 : found.stepOf(value);
    const cell = h("span", { class: gain && step ? "token gain" : "token", role: "listitem", "data-step": step || null }, visibleText(text));
    return explain(cell, JSON.stringify(text), () => tokenRows(p, id, i, found));
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
    h("figcaption", {}, `Window ${p.window + 1}, positions ${p.position} to ${p.position + p.tokens.length - 1}${p.chosen ? `: ${p.chosen}` : ""}`),
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
      ([key]) => key === "loss" || (key === "kld" ? first : !each.isReference && passages.some((p) => p.ref_logprob)),
    );
    if (!paints.some(([key]) => key === inspecting.paint)) inspecting.paint = paints[0][0];
    const found = colours(PAINTS[inspecting.paint], each.id, passages),
      how = passages.some((p) => p.chosen)
        ? "of each quarter of the text the passage in which models differ most, each model's loss beyond the noise floor counted in units of its own mean"
        : "they were chosen where models lost most";
    body.replaceChildren(...[
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
      colourLegend(PAINTS[inspecting.paint], found),
      h(
        "p",
        { class: "hint" },
        `The excerpts are a selection, not a sample: ${how}. Pointer, finger or arrow keys show a token's numbers; ▯ begins a character that the next token ends.`,
      ),
      h("div", { class: "passages" }, passages.map((p) => passage(p, each.id, found))),
      h("h3", {}, "Tokens that suffered most"),
      h(
        "p",
        { class: "hint" },
        `The largest ${first ? "KLD" : "losses"} of ${each.label}; the probabilities are of the text's own token.`,
      ),
      sufferers(each.id),
    ].flat());
  });
}
