// The fork explorer: ban or replace a token, and the engine goes on from there.

function exploreFrom(found, page) {
  return (token, line) => {
    const step = Number(token.dataset.step);
    const id = Number(token.dataset.id);
    const { side } = token.closest("[data-side]").dataset;
    if (!side || side === "explored") return;
    line.dataset.held = "yes";
    line.querySelector(".bar")?.remove();
    const entered = (press) => (event) => { if (event.key === "Enter") { event.preventDefault(); press(); } };
    const replace = () => text.value && go({ replace: text.value });
    const weaken = () => lambda.value && go({ ban: [id], strength: Number(lambda.value) });
    const text = el("input", { id: "replacement", placeholder: "text or #id", size: 16, onkeydown: entered(() => replace()) });
    const lambda = el("input", { id: "strength", type: "number", step: "any", placeholder: "λ", size: 5, onkeydown: entered(() => weaken()) });
    const go = (change) => explore(found, page, { key: found.key, side, step, ...change });
    const bar = el("div", { class: "bar" },
      el("button", { type: "button", id: "ban", onclick: () => go({ ban: [id] }) }, "Ban it from here on"),
      el("label", {}, el("span", {}, "or replace it by"), text),
      el("button", { type: "button", id: "replace", onclick: () => replace() }, "Replace"),
      side === "baseline" ? [el("label", {}, el("span", {}, "or lower its logit by"), lambda), el("button", { type: "button", id: "weaken", onclick: () => weaken() }, "Penalise")] : null,
      el("button", { type: "button", onclick: () => { bar.remove(); delete line.dataset.held; } }, "Cancel"));
    line.append(bar);
  };
}

const asked = ({ ban, replace, strength }) => (known(strength) ? `with ${ban.map(quoted).join(", ")} lower by ${strength}`
  : replace ? `with “${replace}”` : `without ${ban.map(quoted).join(", ")}`);
const over = (state) => ["done", "stopped", "failed"].includes(state);
const pairAddress = (job) => {
  const chosen = Object.entries({ explored: job.id, side: job.side, step: job.step, ban: (job.ban || []).join(), replace: job.replace, strength: job.strength }).filter(([, value]) => known(value) && value !== "");
  return `#/pair/${job.key.join("/")}?${new URLSearchParams(chosen)}`;
};

// Every continuation that the server keeps, of this page and others, each with a way to stop it.
function jobList() {
  const body = el("tbody");
  const box = el("details", { class: "jobs", hidden: true }, el("summary", {}), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Continuations" }, el("table", {},
    el("thead", {}, el("tr", {}, ["what", "trajectory", "step", "tokens", "state", ""].map((name) => el("th", { scope: "col" }, name)))), body)));
  let timer = 0;
  box.refresh = async () => {
    clearTimeout(timer);
    if (!box.isConnected) return;
    const { jobs } = await ask("api/explore").catch(() => ({ jobs: [] }));
    const open = jobs.filter((job) => !over(job.state)).length;
    box.hidden = !jobs.length;
    box.querySelector("summary").textContent = `${plural(jobs.length, "continuation")}${open ? `, ${count(open)} running or waiting` : ""}`;
    body.replaceChildren(...jobs.map((job) => el("tr", { "data-job": job.id },
      el("td", {}, el("a", { href: pairAddress(job) }, asked(job))), el("td", {}, `${job.side} of ${job.key.join("/")}`),
      numeric(count(job.step)), numeric(count(job.tokens)), el("td", {}, job.state),
      el("td", {}, over(job.state) ? null : el("button", { type: "button", onclick: () => ask(`api/explore/${job.id}/stop`, {}).then(box.refresh), "aria-label": `Stop: ${asked(job)}` }, "Stop")))));
    if (open) timer = setTimeout(box.refresh, 1000);
  };
  return box;
}

// A closed or reloaded page cannot wait for an answer, but its last request still arrives.
const leaving = new Set();
addEventListener("pagehide", () => {
  for (const id of leaving) {
    fetch(`api/explore/${id}/stop`, { method: "POST", keepalive: true, headers: { "Content-Type": "application/json", "X-Knockout": settings.key }, body: "{}" });
  }
});

async function explore(found, page, request) {
  page.querySelector(".explored")?.remove();
  const said = el("p", { role: "status" }, "Asking …");
  const stop = el("button", { type: "button" }, "Stop");
  const out = el("div");
  const box = el("section", { class: "explored", "data-side": "explored" },
    el("h2", {}, `From step ${count(request.step)} of the ${request.side}, ${asked(request)}`), said, stop, out);
  page.insertBefore(box, page.querySelector(".status"));
  box.scrollIntoView({ block: "nearest" });
  try {
    const id = request.id || (await ask("api/explore", request)).id;
    // In the address, so that a reload shows the same continuation while the server keeps it.
    choosing({ explored: id, side: request.side, step: request.step, ban: (request.ban || []).join(), replace: request.replace, strength: request.strength });
    leaving.add(id);
    page.querySelector(".jobs")?.refresh();
    stop.addEventListener("click", () => ask(`api/explore/${id}/stop`, {}));
    for (let done = false; !done;) {
      const state = await ask(`api/explore/${id}`);
      done = over(state.state);
      said.textContent = state.message;
      box.dataset.state = state.state;
      if (state.ids.length) {
        out.replaceChildren(tokenRun(state.ids, request.step, new Set(state.banned), { label: "explored continuation", forkAt: request.step }));
      }
      if (done) leaving.delete(id);
      if (!box.isConnected) {
        if (!done) await ask(`api/explore/${id}/stop`, {});
        leaving.delete(id);
        break;
      }
      if (!done) await new Promise((resolve) => { setTimeout(resolve, 400); });
    }
  } catch (error) {
    said.textContent = error.message;
    box.dataset.state = "failed";
  }
  stop.remove();
  page.querySelector(".jobs")?.refresh();
}

// A continuation that the address names is shown again.
function exploredBefore(found, page) {
  const { explored, side, step, ban, replace, strength } = address().chosen;
  if (!explored) return;
  const change = replace ? { replace } : { ban: (ban || "").split(",").filter(Boolean).map(Number) };
  explore(found, page, { key: found.key, side, step: Number(step), ...change, strength: strength ? Number(strength) : null, id: Number(explored) });
}
