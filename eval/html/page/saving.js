// Copies texts to the clipboard, and saves drawings as SVG and PNG. The content policy lets no image be loaded, not even
// one that the page made itself, so a PNG is painted element by element.
const GEOMETRY = ["viewBox", "width", "height", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "d", "transform"];
const LOOKS = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin"];
const LETTERS = ["font-size", "font-weight", "font-family", "text-anchor", "paint-order"];

// A button that says for a moment what became of its click.
function telling(text, act, key) {
  const button = h("button", { type: "button", class: "act", "data-key": key, "aria-live": "polite" }, text);
  button.addEventListener("click", async () => {
    button.textContent = (await act()) ? "Done" : "Not possible here";
    setTimeout(() => (button.textContent = text), 1500);
  });
  return button;
}
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h("textarea", { class: "unseen", "aria-hidden": "true" }),
      focused = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy"); // where a browser has no clipboard for files
    field.remove();
    if (focused) focused.focus({ preventScroll: true });
    return done;
  }
}
function download(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
  return true;
}

// What compare_q writes with --markdown and --csv, of the rows that are shown, in the order in which they are shown.
function markdownText(models) {
  const lines = PAYLOAD.markdown,
    rows = 4; // its subtitle, an empty line, names and alignment of the columns
  return [
    ...lines.slice(0, rows),
    ...models.map((each) => lines[rows + each.id]),
    ...lines.slice(rows + MODELS.length),
  ].join("\n");
}
function csvText(models) {
  return [0, ...models.map((each) => each.id + 1)].map((line) => `${PAYLOAD.csv[line]}\r\n`).join("");
}

// Colours as every reader of SVG knows them: browsers compute color-mix() to color(srgb ...).
const plainColour = (value) =>
  value.replace(/color\(srgb ([\d.]+) ([\d.]+) ([\d.]+)[^)]*\)/, (_, ...parts) =>
    `rgb(${parts.slice(0, 3).map((part) => Math.round(255 * part)).join(", ")})`,
  );
// An element of a drawing with all its looks as attributes, and without what only the pointer needs.
function literal(node) {
  const style = getComputedStyle(node),
    copy = svg(node.tagName);
  if (node.classList.contains("target") || style.visibility === "hidden") return null;
  for (const name of GEOMETRY) if (node.hasAttribute(name)) copy.setAttribute(name, node.getAttribute(name));
  if (!["g", "svg"].includes(node.tagName))
    for (const name of node.tagName === "text" ? [...LOOKS, ...LETTERS] : LOOKS)
      copy.setAttribute(name, plainColour(style.getPropertyValue(name)));
  const children = [...node.childNodes].map((child) => (child.nodeType === Node.TEXT_NODE ? child.textContent : literal(child)));
  return dress(copy, {}, children);
}

// A drawing with its title above and its legend, [swatch, text] each, below: literal, so that it stands alone.
function picture(source, title, legend, subtitle) {
  const [width, height] = source.getAttribute("viewBox").split(" ").slice(2).map(Number),
    page = getComputedStyle(document.body),
    top = 52;
  const write = (text, x, y, size, weight, fill = page.color) =>
    svg("text", { x, y, fill, "font-size": size, "font-weight": weight, "font-family": page.fontFamily }, text);
  const parts = [
    write(title, 14, 22, "16px", 700),
    write(subtitle, 14, 41, "12px", 400),
    dress(literal(source), { y: top }, []),
  ];
  let x = 14,
    y = top + height + 12;
  for (const [sign, text] of legend) {
    const lead = sign ? Number(sign.getAttribute("width")) + 6 : 0,
      wide = lead + textWidth(text) * 1.05 + 18;
    if (x > 14 && x + wide > width) [x, y] = [14, y + 20];
    if (sign) parts.push(dress(literal(sign), { x, y: y - 11 }, []));
    parts.push(write(text, x + lead, y, "12px", 400));
    x += wide;
  }
  const tall = legend.length ? y + 14 : top + height;
  const size = { viewBox: `0 0 ${width} ${tall}`, width, height: tall };
  return svg("svg", size, svg("rect", { x: 0, y: 0, width, height: tall, fill: page.backgroundColor }), parts);
}

function paint(pen, node) {
  const get = (name) => node.getAttribute(name),
    number = (name, otherwise = 0) => (Number.isFinite(parseFloat(get(name))) ? parseFloat(get(name)) : otherwise);
  const turn = (get("transform") || "").match(/rotate\(([-\d.]+) ([-\d.]+) ([-\d.]+)\)/);
  pen.save();
  if (node.tagName === "svg") pen.translate(number("x"), number("y"));
  if (turn) {
    pen.translate(+turn[2], +turn[3]);
    pen.rotate((Math.PI * turn[1]) / 180);
    pen.translate(-turn[2], -turn[3]);
  }
  pen.fillStyle = get("fill");
  pen.strokeStyle = get("stroke");
  pen.lineWidth = number("stroke-width", 1);
  pen.lineJoin = get("stroke-linejoin") || "miter";
  pen.setLineDash((get("stroke-dasharray") || "").match(/[\d.]+/g) || []);
  const inked = (name, draw) => {
    if (!get(name) || get(name) === "none") return;
    pen.globalAlpha = number(`${name}-opacity`, 1);
    draw();
  };
  if (node.tagName === "text") {
    pen.font = ["font-weight", "font-size", "font-family"].map(get).join(" ");
    pen.textAlign = { middle: "center", end: "right" }[get("text-anchor")] || "left";
    for (const name of ["stroke", "fill"]) inked(name, () => pen[`${name}Text`](node.textContent, number("x"), number("y")));
  } else {
    const path = new Path2D(get("d") || (node.tagName === "line" ? `M${get("x1")},${get("y1")}L${get("x2")},${get("y2")}` : ""));
    if (node.tagName === "circle") path.arc(number("cx"), number("cy"), number("r"), 0, 2 * Math.PI);
    if (node.tagName === "rect") path.rect(number("x"), number("y"), number("width"), number("height"));
    for (const name of ["fill", "stroke"]) inked(name, () => pen[name](path));
    for (const child of node.children) paint(pen, child);
  }
  pen.restore();
}
function asPng(root) {
  const canvas = document.createElement("canvas"),
    pen = canvas.getContext("2d"),
    times = Math.max(2, Math.ceil(1600 / root.getAttribute("width")));
  canvas.width = times * root.getAttribute("width");
  canvas.height = times * root.getAttribute("height");
  pen.scale(times, times);
  paint(pen, root);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
// Buttons that save the drawing in a place; legend, subtitle: functions that give its [swatch, text] pairs, and its second line.
function saveButtons(place, title, legend, subtitle = () => RUN.subtitle || "") {
  const name = title.toLowerCase().replace(/[^a-z]+/g, "_"),
    found = () => place.querySelector("svg"),
    whole = () => picture(found(), title, legend(), subtitle());
  const text = () => new XMLSerializer().serializeToString(whole());
  const act = (save) => async () => Boolean(found()) && save();
  return h(
    "div",
    { class: "acts" },
    telling("Save SVG", act(() => download(new Blob([text()], { type: "image/svg+xml" }), `${name}.svg`)), `svg-${name}`),
    telling("Save PNG", act(async () => download(await asPng(whole()), `${name}.png`)), `png-${name}`),
  );
}
const legendOf = (place) => () =>
  [...place.querySelectorAll(".legend li")].map((each) => [each.querySelector("svg"), each.textContent]);
