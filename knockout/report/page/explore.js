// The fork explorer: ban or replace a token, and the engine goes on from there.

function exploreFrom(found, page) {
  return (token, line) => {
    const step = Number(token.dataset.step);
    const id = Number(token.dataset.id);
    const { side } = token.closest("[data-side]").dataset;
    if (!side || side === "explored") return;
    line.dataset.held = "yes";
    line.querySelector(".bar")?.remove();
    const text = el("input", { id: "replacement", placeholder: "text or #id", size: 16 });
    const go = (change) => explore(found, page, { key: found.key, side, step, ...change });
    const bar = el("div", { class: "bar" },
      el("button", { type: "button", id: "ban", onclick: () => go({ ban: [id] }) }, "Ban it from here on"),
      el("label", {}, el("span", {}, "or replace it by"), text),
      el("button", { type: "button", id: "replace", onclick: () => text.value && go({ replace: text.value }) }, "Replace"),
      el("button", { type: "button", onclick: () => { bar.remove(); delete line.dataset.held; } }, "Cancel"));
    line.append(bar);
  };
}

async function explore(found, page, request) {
  page.querySelector(".explored")?.remove();
  const said = el("p", { role: "status" }, "The engine starts …");
  const stop = el("button", { type: "button" }, "Stop");
  const out = el("div");
  const what = request.ban ? `without ${request.ban.map(quoted).join(", ")}` : `with “${request.replace}”`;
  const box = el("section", { class: "explored", "data-side": "explored" },
    el("h2", {}, `From step ${count(request.step)} of the ${request.side}, ${what}`), said, stop, out);
  page.insertBefore(box, page.querySelector(".status"));
  box.scrollIntoView({ block: "nearest" });
  try {
    const { id } = await ask("api/explore", request);
    stop.addEventListener("click", () => ask(`api/explore/${id}/stop`, {}));
    for (let done = false; !done && box.isConnected;) {
      const state = await ask(`api/explore/${id}`);
      done = ["done", "stopped", "failed"].includes(state.state);
      said.textContent = state.message;
      box.dataset.state = state.state;
      if (state.ids.length) {
        out.replaceChildren(tokenRun(state.ids, request.step, new Set(state.banned), { label: "explored continuation", forkAt: request.step }));
      }
      if (!done) await new Promise((resolve) => { setTimeout(resolve, 400); });
    }
  } catch (error) {
    said.textContent = error.message;
    box.dataset.state = "failed";
  }
  stop.remove();
}
