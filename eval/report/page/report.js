"use strict";
for (const table of document.querySelectorAll("table.models")) {
  const heads = [...table.tHead.rows[0].cells];
  const sort = (head) => {
    const column = heads.indexOf(head), numbers = head.classList.contains("number");
    const sign = head.ariaSort === "ascending" ? -1 : 1;
    for (const other of heads) other.ariaSort = null;
    head.ariaSort = sign > 0 ? "ascending" : "descending";
    const key = (row) => row.cells[column].dataset.key;
    const compare = (a, b) => (a === "") - (b === "") || sign * (numbers ? a - b : a.localeCompare(b));
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => compare(key(a), key(b))));
  };
  for (const head of heads) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head));
    head.append(button);
  }
}

for (const box of document.querySelectorAll(".figures")) {
  const figures = [...box.querySelectorAll("figure")];
  if (figures.length < 2) continue;
  const bar = document.createElement("div");
  bar.className = "tabs";
  const show = (chosen) => figures.forEach((figure, i) => {
    figure.hidden = i !== chosen;
    bar.children[i].ariaPressed = String(i === chosen);
  });
  figures.forEach((figure, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = figure.querySelector("figcaption").textContent;
    button.addEventListener("click", () => show(i));
    bar.append(button);
  });
  box.prepend(bar);
  box.classList.add("switched");
  show(0);
}
