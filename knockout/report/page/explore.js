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

async function explore(found, page, request) {
  page.querySelector(".explored")?.remove();
  const said = el("p", { role: "status" }, "Asking …");
  const stop = el("button", { type: "button" }, "Stop");
  const out = el("div");
  const what = known(request.strength) ? `with ${request.ban.map(quoted).join(", ")} lower by ${request.strength}` : request.ban ? `without ${request.ban.map(quoted).join(", ")}` : `with “${request.replace}”`;
  const box = el("section", { class: "explored", "data-side": "explored" },
    el("h2", {}, `From step ${count(request.step)} of the ${request.side}, ${what}`), said, stop, out);
  page.insertBefore(box, page.querySelector(".status"));
  box.scrollIntoView({ block: "nearest" });
  try {
    const id = request.id || (await ask("api/explore", request)).id;
    // In the address, so that a reload shows the same continuation while the server keeps it.
    choosing({ explored: id, side: request.side, step: request.step, ban: (request.ban || []).join(), replace: request.replace, strength: request.strength });
    stop.addEventListener("click", () => ask(`api/explore/${id}/stop`, {}));
    for (let done = false; !done;) {
      const state = await ask(`api/explore/${id}`);
      done = ["done", "stopped", "failed"].includes(state.state);
      said.textContent = state.message;
      box.dataset.state = state.state;
      if (state.ids.length) {
        out.replaceChildren(tokenRun(state.ids, request.step, new Set(state.banned), { label: "explored continuation", forkAt: request.step }));
      }
      if (!box.isConnected) {
        if (!done) await ask(`api/explore/${id}/stop`, {});
        break;
      }
      if (!done) await new Promise((resolve) => { setTimeout(resolve, 400); });
    }
  } catch (error) {
    said.textContent = error.message;
    box.dataset.state = "failed";
  }
  stop.remove();
}

// A continuation that the address names is shown again.
function exploredBefore(found, page) {
  const { explored, side, step, ban, replace, strength } = address().chosen;
  if (!explored) return;
  const change = replace ? { replace } : { ban: (ban || "").split(",").filter(Boolean).map(Number) };
  explore(found, page, { key: found.key, side, step: Number(step), ...change, strength: strength ? Number(strength) : null, id: Number(explored) });
}
