// Figures: the page has the specifications (knockout/figures), and puts rows, colours and width in.

const drawn = new Set();
const tip = el("div", { id: "tip", hidden: true, role: "presentation" });
document.body.append(tip);

function showTip(handler, event, item, value) {
  tip.hidden = !value;
  if (!value) return;
  tip.replaceChildren(...Object.entries(value).filter(([, text]) => known(text) && text !== "").map(([name, text]) => el("div", {}, el("span", { class: "dim" }, `${name} `), String(text))));
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const top = event.clientY + tip.offsetHeight + 24 > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 14;
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

// A figure with its two downloads. `columns` names what the CSV has; `click` opens a row's candidate.
function plot(name, label, rows, { columns = null, file = name } = {}) {
  const canvas = el("div", { class: "canvas", role: "img", "aria-label": label });
  const box = el("div", { class: "plot" }, canvas);
  if (!rows.length) return el("p", { class: "dim" }, "Nothing to draw.");
  const item = { box, view: null, width: 0 };
  item.draw = (width = canvas.clientWidth) => {
    if (!width || !box.isConnected) return;
    item.view?.finalize();
    item.width = width;
    const theme = overview.themes[document.documentElement.dataset.theme];
    const narrow = width < 560;
    const drawing = narrow ? withoutMargin(overview.figures[name]) : overview.figures[name];
    // The figure is one picture with a label; the table has its numbers for those who cannot see it.
    const hush = { aria: false };
    const spec = {
      autosize: { type: "fit-x", contains: "padding" }, width, description: label, padding: 4,
      ...drawing, datasets: { rows },
      config: { ...theme, aria: false, mark: hush, axis: { ...theme.axis, ...hush }, legend: { ...theme.legend, ...hush, columns: narrow ? 2 : 0 } },
    };
    const parsed = vega.parse(vegaLite.compile(spec, { logger: quiet }).spec, null, { ast: true });
    item.view = new vega.View(parsed, { expr: vega.expressionInterpreter, renderer: "svg", container: canvas, hover: true, logLevel: vega.Error });
    item.view.tooltip(showTip);
    item.view.addEventListener("click", (event, mark) => {
      if (mark?.datum && known(mark.datum.c)) location.hash = `#/candidate/${mark.datum.c}`;
    });
    item.view.runAsync().then(() => { box.dataset.drawn = "yes"; });
  };
  const save = async () => download(`${file}.svg`, "image/svg+xml", await item.view.toSVG());
  box.append(el("div", { class: "save" },
    el("button", { type: "button", onclick: save, "aria-label": `${label}: save as SVG` }, "SVG"),
    el("button", { type: "button", onclick: () => download(`${file}.csv`, "text/csv", csv(columns ? rows.map((r) => Object.fromEntries(columns.map((key) => [key, r[key]]))) : rows)), "aria-label": `${label}: save the data as CSV` }, "CSV")));
  drawn.add(item);
  requestAnimationFrame(() => item.draw());
  return box;
}
// On a phone the numbers beside the rows of a forest plot would leave no room for the plot.
function withoutMargin(spec) {
  return spec.padding?.right >= 100 ? { ...spec, padding: 4, layer: spec.layer.slice(0, -1) } : spec;
}
const quiet = { level() { return this; }, error(...words) { console.error(...words); return this; }, warn() { return this; }, info() { return this; }, debug() { return this; } };

const redraw = () => {
  tip.hidden = true;
  for (const item of drawn) {
    if (item.box.isConnected) item.draw();
    else { item.view?.finalize(); drawn.delete(item); }
  }
};
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    for (const item of drawn) if (item.box.isConnected && item.box.firstChild.clientWidth !== item.width) item.draw();
  }, 150);
});
