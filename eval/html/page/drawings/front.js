// Which points of the scatter plot a line joins, the Pareto front, and the edge where unquantized ones stand:
// eval/plots/front.py.
const UNQUANTIZED_BITS = 15.5; // eval/plots/figures.py
const unquantized = (m) => known(m.bpw) && m.bpw >= UNQUANTIZED_BITS;
const schemeOf = (p) => PAYLOAD.schemes[p.m.id];
const bySize = (points) => [...points].sort((a, b) => a.x - b.x || a.cost - b.cost);

// Quantized points of one scheme in order of size.
function series(points) {
  const kept = bySize(points.filter((p) => !p.off && !unquantized(p.m)));
  return [...new Set(kept.map(schemeOf))]
    .map((scheme) => kept.filter((p) => schemeOf(p) === scheme))
    .filter((members) => members[members.length - 1].x > PAYLOAD.rule.alike * members[0].x);
}
// The quantized points that no other quantized point beats, in order of size.
function paretoFront(points) {
  const quantized = bySize(points.filter((each) => !unquantized(each.m))),
    { alike } = PAYLOAD.rule,
    beats = (other, one) =>
      other.cost < one.cost ? other.x <= alike * one.x : other.cost === one.cost && alike * other.x < one.x;
  return quantized.filter((one) => !quantized.some((other) => beats(other, one)));
}
// "EXL3 2.0 bpw to EXL3 6.0 bpw, GGUF Q8_0"
function inWords(front, points) {
  return [...new Set(front.map((p) => p.m.group))]
    .map((group) => {
      const members = front.filter((p) => p.m.group === group),
        [first, last] = [members[0], members[members.length - 1]],
        names = members.map((p) => p.m.label);
      const between = points.filter((p) => p.m.group === group && first.x <= p.x && p.x <= last.x),
        whole = between.length === members.length && new Set(members.map(schemeOf)).size === 1;
      return members.length >= PAYLOAD.rule.range && whole ? `${first.m.label} to ${last.m.label}` : names.join(", ");
    })
    .join(", ");
}
// Moves unquantized points that are far larger than all others to just beside these; the edge: {at, broken, text}, or null.
function toEdge(points) {
  const sizes = points.filter((p) => !unquantized(p.m)).map((p) => p.x),
    others = points.filter((p) => unquantized(p.m)),
    largest = Math.max(...sizes),
    { near, gap } = PAYLOAD.rule;
  if (!sizes.length || !others.length || Math.min(...others.map((p) => p.x)) <= near * largest) return null;
  const room = gap * Math.max(largest - Math.min(...sizes), largest / 2),
    texts = new Set(others.map((p) => String(+p.x.toPrecision(3))));
  for (const p of others) p.x = largest + room;
  return { at: largest + room, broken: largest + room / 2, text: texts.size === 1 ? [...texts][0] : "unquantized" };
}
