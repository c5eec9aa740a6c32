// Pages by the address's hash, the theme, and in a live page the refresh.

const PAGES = { "": ["Overview", overviewPage], table: ["Table", tablePage], health: ["Health", healthPage] };
const DEEP = { candidate: candidatePage, pair: pairPage };
let overview = null;
let turn = 0;

function frame(data) {
  byId("run-name").textContent = data.run.name;
  const state = data.run.complete ? "complete" : `${count(data.run.cells_done)} of ${count(data.run.n_cells)} cells`;
  byId("run-about").textContent = `${data.run.model} · ${state}${settings.live ? " · live" : ""}`;
}

async function show(focus) {
  const own = (turn += 1);
  const [page = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  byId("nav").replaceChildren(...Object.entries(PAGES).map(([key, [name]]) => el("a", { href: `#/${key}`, "aria-current": key === page ? "page" : null }, name)));
  const make = (PAGES[page] || [null, DEEP[page] || overviewPage])[1];
  let content;
  try {
    content = await make(overview, rest);
  } catch (error) {
    content = [el("h1", {}, "This page could not be shown"), el("p", { class: "warning" }, String(error.message || error))];
    if (!(error instanceof TypeError && settings.live)) console.error(error);
  }
  if (own !== turn) return;
  byId("main").replaceChildren(...content.flat(9).filter((node) => node));
  byId("main").dataset.page = page || "overview";
  if (focus) {
    byId("main").focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

function theme(wanted) {
  document.documentElement.dataset.theme = wanted;
  redraw();
}

async function refresh() {
  try {
    const next = await source.overview();
    const changed = JSON.stringify(next) !== JSON.stringify(overview);
    overview = next;
    frame(overview);
    const page = byId("main").dataset.page;
    const busy = document.activeElement && ["INPUT", "SELECT"].includes(document.activeElement.tagName);
    if (changed && ["overview", "health"].includes(page) && !busy) await show(false);
  } catch (error) {
    byId("run-about").textContent = `the server does not answer (${error.message})`;
  }
}

async function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  dark.addEventListener("change", (event) => theme(event.matches ? "dark" : "light"));
  byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  try {
    overview = await source.overview();
  } catch (error) {
    byId("main").replaceChildren(el("h1", {}, "The run could not be read"), el("p", { class: "warning" }, error.message));
    return;
  }
  frame(overview);
  addEventListener("hashchange", () => show(true));
  await show(false);
  if (settings.live) setInterval(() => document.hidden || refresh(), 1000 * settings.every);
}

start();
