// The first page: what came out, what it cost, and the plots.

const view = { benchmark: null, strongest: true, other: null };

function benchmarksOf(data) {
  return [...new Set(data.rows.map((row) => row.benchmark))];
}

function headline(data) {
  if (!data.rows.length) return "No verdicts yet";
  const { rule } = data.run;
  const found = data.counts.filter((entry) => entry.group === "candidate");
  const n = data.candidates.filter((c) => c.group === "candidate").length;
  const part = (key, name) => {
    const where = found.filter((entry) => entry[rule][key]);
    if (!where.length) return `no strong ${name}`;
    return where.map((entry) => `${plural(entry[rule][key], `strong ${name}`)} ${entry.benchmark === "pooled" ? "pooled over all benchmarks" : `on ${entry.benchmark}`}`).join(", ");
  };
  const text = `${part("strong_pillar", "pillar")}; ${part("strong_stumbling_block", "stumbling block")}`;
  return `${plural(n, "candidate")}: ${text}`;
}

function answerTable(data) {
  const { rule } = data.run;
  const other = rule === "fdr" ? "nominal" : "fdr";
  const keys = Object.keys(VERDICTS);
  const pass = (name) => {
    const row = data.rows.find((r) => r.benchmark === name);
    return row ? percent(row.pass1_baseline) : "–";
  };
  const cell = (entry, key) => numeric(
    el("strong", { class: entry[rule][key] ? key : "zero" }, count(entry[rule][key])),
    el("span", { class: "dim" }, ` (${count(entry[other][key])})`),
  );
  return el("div", { class: "scroll" }, el("table", {},
    el("caption", { class: "dim", style: "text-align: left; padding-bottom: .3rem" },
      `By the rule ${rule} at α = ${data.run.alpha}, margin ± ${data.run.margin}; in brackets by the rule ${other}. Click a number of candidates to list them.`),
    el("thead", {}, el("tr", {},
      el("th", { scope: "col" }, "benchmark"), el("th", { scope: "col" }, "group"),
      el("th", { scope: "col", class: "n" }, "Pass@1"), el("th", { scope: "col", class: "n" }, "n"),
      keys.map((key) => el("th", { scope: "col", class: "n" }, badge(key))))),
    el("tbody", {}, data.counts.map((entry) => el("tr", {},
      el("th", { scope: "row" }, entry.benchmark), el("td", {}, GROUPS[entry.group]),
      numeric(pass(entry.benchmark)),
      numeric(el("a", { href: `#/table/${encodeURIComponent(entry.benchmark)}/${entry.group}` }, count(entry.n))),
      keys.map((key) => cell(entry, key))))),
  ));
}

function costTable(data) {
  const { cost } = data;
  const most = Math.max(...data.benchmarks.map((b) => b.tokens_naive), 1);
  const meter = (n, kind) => {
    const bar = el("span", { class: `meter ${kind}`, "aria-hidden": "true" });
    bar.style.width = `${(100 * n) / most}%`;
    return bar;
  };
  const ratio = (b) => (b.tokens_generated ? `${fixed(b.tokens_naive / b.tokens_generated, 1)}×` : "–");
  const spent = cost.wall_s ? ` in ${duration(cost.wall_s)} of running` : "";
  const racingNote = cost.tokens_planned > 1.02 * cost.tokens_naive && data.run.complete
    ? ` With all planned seeds for every candidate it would have been about ${big(cost.tokens_planned)}.` : "";
  return [
    el("p", {}, `${big(cost.tokens_generated)} tokens generated${spent}; full runs of the same knockouts would have generated ${big(cost.tokens_naive)}, ${ratio(cost)} as many. `
      + `${share(cost.inherited, cost.inherited + cost.forks)} of the knockouts are their baseline and cost nothing.${racingNote}`
      + (cost.tokens_audit ? ` Audits took another ${big(cost.tokens_audit)}.` : "")),
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["benchmark", "cells", "forked", "generated", "naive", "saved"].map((name, i) => el("th", { scope: "col", class: i ? "n" : null }, name)))),
      el("tbody", {}, data.benchmarks.map((b) => el("tr", {},
        el("th", { scope: "row" }, b.name, el("div", { class: "meters" }, meter(b.tokens_generated, ""), meter(b.tokens_naive, "naive"))), numeric(`${count(b.n_cells)} of ${count(b.n_problems * b.n_seeds)}`),
        numeric(share(b.forks, b.forks + b.inherited)),
        numeric(big(b.tokens_generated)), numeric(big(b.tokens_naive)), numeric(ratio(b))))))),
  ];
}

function plotsOf(data) {
  const names = benchmarksOf(data);
  if (!names.includes(view.benchmark)) [view.benchmark] = names;
  const rows = data.rows.filter((r) => r.benchmark === view.benchmark && known(r.delta));
  const others = names.filter((name) => name !== view.benchmark);
  if (!others.includes(view.other)) [view.other] = others;
  const strength = (r) => Math.abs(r.delta);
  const few = [...rows].sort((a, b) => strength(b) - strength(a)).slice(0, 40);
  const many = rows.length > few.length;
  const shown = view.strongest ? few : rows;
  const again = () => box.replaceWith((box = plotsOf(data)));
  const search = el("input", {
    type: "search", list: "names", placeholder: "token or id", onchange: (event) => {
      const found = findCandidate(data, event.target.value);
      if (known(found)) location.hash = `#/candidate/${found}`;
      else event.target.setCustomValidity("no such candidate"), event.target.reportValidity();
    }, oninput: (event) => event.target.setCustomValidity(""),
  });
  const raced = data.racing.some((h) => Object.values(h.active).some((n) => new Set(n.filter((x) => x)).size > 1));
  let box = el("div", {},
    el("div", { class: "bar" },
      choose("benchmark", names.map((n) => [n, n]), view.benchmark, (v) => { view.benchmark = v; again(); }),
      many ? choose("rows", [["few", `${few.length} largest |Δ|`], ["all", `all ${rows.length}`]], view.strongest ? "few" : "all", (v) => { view.strongest = v === "few"; again(); }) : null,
      el("label", {}, el("span", {}, "go to candidate"), search),
      el("datalist", { id: "names" }, data.candidates.slice(0, 2000).map((c) => el("option", { value: c.name })))),
    legend(rows),
    figure("Δ with its interval", "Click a row for the candidate.", el("div", { class: many && !view.strongest ? "tall" : "" }, forest(shown))),
    el("div", { class: "grid" },
      figure("Effect and evidence", `Above the dotted line p < ${data.run.alpha}.`, volcano(rows, data.run.alpha)),
      figure("Effect and frequency", "Candidates that the baselines never emit are left out.", againstFrequency(rows)),
      view.other ? figure("Agreement between benchmarks", "Coloured by the verdict on the first.",
        others.length > 1 ? el("div", { class: "bar" }, choose("against", others.map((n) => [n, n]), view.other, (v) => { view.other = v; again(); })) : null,
        agreement(rows, data.rows.filter((r) => r.benchmark === view.other), [view.benchmark, view.other])) : null,
      figure("p-values", "Flat where nothing has an effect; a peak at the left is signal. A peak at 1: bans that changed no grade.", pHistogram(rows)),
      raced ? figure("Racing", "Candidates that each round of seeds still knocked out.", racing(data.racing)) : null));
  return box;
}

function legend(rows) {
  const kinds = Object.keys(VERDICTS).filter((key) => rows.some((r) => r.key === key));
  const shapes = { candidate: "●", control: "◇", canary: "×" };
  const groups = Object.keys(GROUPS).filter((g) => rows.some((r) => r.group === g));
  return el("p", { class: "dim" }, kinds.map((key) => [badge(key), "  "]),
    groups.length > 1 ? ["· ", groups.map((g) => `${shapes[g]} ${GROUPS[g]}`).join("  ")] : null);
}

function findCandidate(data, text) {
  const wanted = text.trim();
  if (!wanted) return null;
  const tests = [
    (c) => c.name === text || c.name === wanted,
    (c) => c.ids.map(String).includes(wanted),
    (c) => c.name.toLowerCase().includes(wanted.toLowerCase()),
  ];
  for (const test of tests) {
    const at = data.candidates.findIndex(test);
    if (at >= 0) return at;
  }
  return null;
}

function overviewPage(data) {
  const state = data.run.complete ? null
    : el("p", { class: "note" }, `The run is not finished: ${count(data.run.cells_done)} of ${count(data.run.n_cells)} cells. Verdicts may change.`);
  return [
    el("h1", {}, headline(data)), state,
    data.health.warnings.map((text) => el("p", { class: "warning" }, text)),
    data.run.has_tokenizer ? null : el("p", { class: "warning" }, "The model's tokenizer is not on this machine: tokens other than the candidates are shown as ids."),
    el("div", { class: "split" },
      data.rows.length ? el("section", {}, el("h2", {}, "Verdicts"), answerTable(data)) : null,
      el("section", {}, el("h2", {}, "Cost"), costTable(data))),
    data.rows.length ? [el("h2", {}, "Candidates"), plotsOf(data)] : null,
  ];
}
