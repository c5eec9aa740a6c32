// Pages by the address's hash, the theme, and in a live page the refresh.

const PAGES = { "": ["Overview", overviewPage], table: ["Table", tablePage], health: ["Health", healthPage] };
const compared = (data) => (data.comparison ? { compare: ["Compare", comparePage] } : {});
const DEEP = { candidate: candidatePage, pair: pairPage };
let overview = null;
let turn = 0;
let stale = false;

function frame(data) {
  byId("run-name").textContent = data.run.name;
  const state = data.run.complete ? "complete" : `${count(data.run.cells_done)} of ${count(data.run.n_cells)} cells`;
  byId("run-about").textContent = `${data.run.model} · ${state}${settings.live ? " · live" : ""}`;
}

async function show(focus) {
  const own = (turn += 1);
  const { parts: [page = "", ...rest] } = address();
  const pages = { ...PAGES, ...compared(overview) };
  byId("nav").replaceChildren(...Object.entries(pages).map(([key, [name]]) => el("a", { href: `#/${key}`, "aria-current": key === page ? "page" : null }, name)));
  const make = (pages[page] || [null, DEEP[page] || nowhere])[1];
  let content;
  try {
    content = await make(overview, rest);
  } catch (error) {
    content = [el("h1", {}, "This page could not be shown"), el("p", { class: "warning" }, String(error.message || error))];
    if (!(error instanceof TypeError && settings.live)) console.error(error);
  }
  if (own !== turn) return;
  const at = scrollY;
  byId("main").replaceChildren(...content.flat(9).filter((node) => node));
  byId("main").dataset.page = page || "overview";
  const heading = byId("main").querySelector("h1");
  document.title = `${page === "" ? "Overview" : clip(heading?.textContent || page, 60)} · ${overview.run.name} · knockout`;
  if (focus) {
    byId("main").focus({ preventScroll: true });
    scrollTo(0, 0);
  } else scrollTo(0, at);
}

function nowhere() {
  return [el("h1", {}, "There is no such page"), el("p", {}, "Go to the ", el("a", { href: "#/" }, "overview"), ".")];
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
    stale = stale || changed;
    // A page that somebody types into is drawn anew at the next turn; a pair of trajectories never changes.
    if (stale && page !== "pair" && !busy) {
      stale = false;
      await show(false);
    }
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
  addEventListener("beforeprint", () => { for (const item of drawn) if (item.box.isConnected) item.draw(Math.min(item.width, 640)); });
  addEventListener("afterprint", redraw);
  await show(false);
  if (settings.live) setInterval(() => document.hidden || refresh(), 1000 * settings.every);
}

start();
