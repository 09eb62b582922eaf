// The bar of sections and selected models.
// Unselects a model; the focus goes to the × of the next model, else of the last, else to the model's row.
function drop(id) {
  const at = chosenModels().findIndex((each) => each.id === id);
  toggleModel(id);
  const left = [...document.querySelectorAll("#chips .drop")];
  (left[Math.min(at, left.length - 1)] || document.querySelector(`[data-key="row-${id}"]`)).focus();
}
// A report of several texts keeps the name of the text in its address.
const goTo = (section) => (event) => {
  if (!TEXTS.length) return;
  event.preventDefault();
  section.scrollIntoView();
};
function selectionBar() {
  const links = [...document.querySelectorAll("main > section")].filter((each) => !each.hidden);
  byId("links").append(
    ...links.map((each) =>
      h("li", {}, h("a", { href: `#${each.id}`, onclick: goTo(each) }, each.dataset.short || each.querySelector("h2").textContent)),
    ),
  );
  onChange(() => {
    const chip = (each) =>
      h(
        "span",
        { class: each.id === state.current ? "chip current" : "chip" },
        h(
          "button",
          {
            type: "button",
            "data-key": `chip-${each.id}`,
            title: "show in the sections of one model",
            onclick: () => makeCurrent(each.id),
          },
          swatch(each.group, dashOf(each)),
          h("span", {}, each.label),
        ),
        h(
          "button",
          {
            type: "button",
            class: "drop",
            "data-key": `drop-${each.id}`,
            "aria-label": `unselect ${each.label}`,
            onclick: () => drop(each.id),
          },
          "×",
        ),
      );
    byId("chips").replaceChildren(...chosenModels().map(chip));
  });
}
