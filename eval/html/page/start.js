// What the file holds, and what stays when a report of several texts shows another text, for which the page is made anew.
const WHOLE = JSON.parse(document.getElementById("payload").textContent);
const RESULTS = WHOLE.results;
const TEXTS = RESULTS.texts.length > 1 ? RESULTS.texts : []; // of one text the page has no tabs
const PRISTINE = document.getElementById("page").cloneNode(true);
const KEPT = { text: Math.max(TEXTS.findIndex((each) => !each.error), 0), hidden: [], chosen: null };
let running = new AbortController();

// The payload of one text as a report of this text alone has it.
function payloadOf(i) {
  const run = { ...RESULTS, models: [], ...RESULTS.texts[i], parts: RESULTS.parts.length ? RESULTS.parts : null };
  if (!TEXTS.length) return { ...WHOLE, run, inspection: WHOLE.inspections[0] };
  return { ...WHOLE.shared, ...WHOLE.pages[i], run, inspection: WHOLE.inspections[i] };
}
const hashOf = (i) => `#text=${encodeURIComponent(TEXTS[i].name.replace(/\p{Surrogate}/gu, "\ufffd"))}`;
const textOfHash = () => TEXTS.findIndex((_, i) => hashOf(i) === location.hash);
function start() {
  const again = textOfHash(),
    [x, y] = [scrollX, scrollY];
  if (again >= 0) KEPT.text = again;
  document.getElementById("tip").hidden = true;
  running.abort(); // nothing of the page that goes listens any more
  running = new AbortController();
  document.getElementById("page").replaceWith(PRISTINE.cloneNode(true));
  page(payloadOf(KEPT.text), running.signal);
  scrollTo({ left: x, top: y, behavior: "instant" });
}
