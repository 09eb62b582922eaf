// How many waves the errors of so many blocks (groups) come from: eval/stats/uncertainty.py, n_waves().
const nWaves = (groups, length) =>
  Math.min(
    Math.max(Math.floor(Math.sqrt(Math.floor(length / PAYLOAD.rule.unit))), PAYLOAD.rule.fewest),
    PAYLOAD.rule.most,
    groups - 1,
  );
// The standard error of a mean, from sums and counts by block: eval/stats/uncertainty.py, clustered_error().
function clusteredError(total, tokens, length) {
  const kept = tokens.map((each, i) => i).filter((i) => tokens[i] > 0),
    groups = kept.length;
  const n = kept.reduce((sum, i) => sum + tokens[i], 0),
    mean = kept.reduce((sum, i) => sum + total[i], 0) / n;
  if (groups < 2) return null;
  const count = nWaves(groups, length),
    memory = PAYLOAD.rule.memory / Math.max(length, PAYLOAD.rule.short);
  let squares = 0;
  for (let j = 1; j <= count; j++) {
    const slow = (g) => Math.cos((Math.PI * j * (g + 0.5)) / groups);
    const part = kept.reduce((sum, i, g) => sum + slow(g) * (total[i] - mean * tokens[i]), 0);
    squares += 2 * part ** 2 * (1 + memory * j ** 2);
  }
  return Math.sqrt(squares / count) / n;
}

// Mean of "nll", "kld" or "same_top" of a minus the mean of b: value, stderr and 95 % interval; null if it is unknown.
// eval/results/differences.py, difference_with_interval()
function pairedDifference(a, b, name) {
  const one = a.blocks,
    other = b.blocks;
  if (name !== "nll" && a.raw.reference_key !== b.raw.reference_key) return null; // each KLD is against the reference of its own run
  if (!one || !other || !one.whole.includes(name) || !other.whole.includes(name)) return null;
  if (one.tokens.length !== other.tokens.length || one.tokens.some((n, i) => n !== other.tokens[i])) return null;
  const off = one[name].map((each, i) => each - other[name][i]);
  const n = one.tokens.reduce((sum, each) => sum + each, 0);
  const value = off.reduce((sum, each) => sum + each, 0) / n,
    stderr = clusteredError(off, one.tokens, one.length);
  const groups = one.tokens.filter((each) => each > 0).length;
  const reach = known(stderr) ? PAYLOAD.t975[nWaves(groups, one.length) - 1] * stderr : null;
  return { value, stderr, low: known(reach) ? value - reach : null, high: known(reach) ? value + reach : null };
}

// Whether 0 lies outside the 95 % interval of a difference: eval/results/differences.py, is_seen.
const distinct = (found) => found !== null && known(found.low) && (found.low > 0 || found.high < 0);

// The error of a model's perplexity, paired with the reference where that is known: eval/plots/measures.py, ppl_error().
function toReference(m) {
  const found = m.against && m.against.ln_ppl_ratio;
  return found || (REFERENCE && pairedDifference(m, REFERENCE, "nll"));
}
function pplError(m) {
  if (m.isReference || !known(m.ppl.value)) return { error: null, paired: true };
  const ratio = toReference(m);
  if (!ratio) return { error: m.ppl.stderr, paired: false };
  return { error: known(ratio.stderr) ? m.ppl.value * ratio.stderr : null, paired: true };
}
function pplRatio(m) {
  if (known(m.ratio.value) || !known(m.ppl.value)) return m.ratio;
  const { value, stderr } = estimate(toReference(m));
  return known(value)
    ? { value: Math.exp(value), stderr: known(stderr) ? Math.exp(value) * stderr : null }
    : estimate(null);
}

// The error of a model's accuracy in percentage points, paired with the reference's: eval/plots/measures.py, accuracy_error().
const answersOf = (m, kind) => (m.raw.estimates && m.raw.estimates.answers ? m.raw.estimates.answers[kind] : null);
function accuracyError(m, kind) {
  const own = answersOf(m, kind),
    other = REFERENCE && answersOf(REFERENCE, kind);
  if (m.isReference || !own) return { error: null, paired: true };
  const count = own.right.length;
  if (!other || !count || other.right.length !== count)
    return { error: known(own.accuracy.stderr) ? 100 * own.accuracy.stderr : null, paired: false };
  const off = [...own.right].map((each, i) => each - other.right[i]),
    mean = sum(off) / count;
  return { error: count < 2 ? null : 100 * Math.sqrt(sum(off.map((each) => (each - mean) ** 2)) / (count - 1) / count), paired: true };
}
const accuracyOf = (kind) => (m) => {
  const found = answersOf(m, kind);
  return { value: found && known(found.accuracy.value) ? 100 * found.accuracy.value : null, stderr: accuracyError(m, kind).error };
};

// The largest value to draw to scale: eval/plots/scatter.py, _ceiling().
function ceiling(values, least) {
  const ranked = [...values].sort((a, b) => a - b),
    half = Math.floor((ranked.length - 1) / 2);
  for (let i = half, j = Math.floor((ranked.length + 1) / 2); j < ranked.length; i++, j++) {
    const spread = ranked[i] - ranked[0];
    if (spread > 0 && 10 * spread < ranked[j] - ranked[0] && ranked[j] > Math.max(1.5 * ranked[i], least))
      return ranked[i];
  }
  return ranked[ranked.length - 1];
}
