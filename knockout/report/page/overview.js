// The first page: what came out, what it cost, what to do next, and the figures.

const RULES = [["fdr", "fdr (corrected)"], ["nominal", "nominal"]];

function benchmarksOf(data) {
  return [...new Set(data.rows.map((row) => row.benchmark))];
}

function ruleOf(data) {
  const { rule } = address().chosen;
  return RULES.some(([key]) => key === rule) ? rule : data.run.rule;
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
  const list = (entry) => `#/table?${new URLSearchParams({ benchmark: entry.benchmark, group: entry.group })}`;
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Verdicts by benchmark" }, el("table", {},
    el("caption", { class: "dim" },
      `By rule ${rule} at α = ${data.run.alpha}, margin ± ${data.run.margin}; in brackets by rule ${other}.`),
    el("thead", {}, el("tr", {},
      el("th", { scope: "col" }, "benchmark"), el("th", { scope: "col" }, "group"),
      el("th", { scope: "col", class: "n" }, "Pass@1"), el("th", { scope: "col", class: "n" }, "n"),
      keys.map((key) => el("th", { scope: "col", class: "n" }, badge(key))))),
    el("tbody", {}, data.counts.map((entry) => el("tr", {},
      el("th", { scope: "row" }, entry.benchmark), el("td", {}, GROUPS[entry.group]),
      numeric(pass(entry.benchmark)),
      numeric(el("a", { href: list(entry) }, count(entry.n))),
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
  const knockouts = cost.inherited + cost.forks;
  const raced = data.racing.some((h) => Object.values(h.active).some((n) => new Set(n).size > 1));
  const notes = [
    cost.wall_s ? `${duration(cost.wall_s)} of running.` : null,
    knockouts ? `${share(cost.inherited, knockouts)} of the knockouts are their baseline and cost nothing.` : null,
    raced && data.run.complete ? `With all planned seeds for every candidate it would have been about ${big(cost.tokens_planned)}.` : null,
    cost.tokens_audit ? `Audits took another ${big(cost.tokens_audit)}.` : null,
  ];
  return [
    el("p", {}, data.findings.cost, " ", notes.filter(Boolean).join(" ")),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Cost by benchmark" }, el("table", {},
      el("thead", {}, el("tr", {}, ["benchmark", "cells", "forked", "generated", "naive", "saved"].map((name, i) => el("th", { scope: "col", class: i ? "n" : null }, name)))),
      el("tbody", {}, data.benchmarks.map((b) => el("tr", {},
        el("th", { scope: "row" }, b.name, el("div", { class: "meters" }, meter(b.tokens_generated, ""), meter(b.tokens_naive, "naive"))), numeric(`${count(b.n_cells)} of ${count(b.n_problems * b.n_seeds)}`),
        numeric(b.forks + b.inherited ? share(b.forks, b.forks + b.inherited) : "–"),
        numeric(big(b.tokens_generated)), numeric(big(b.tokens_naive)), numeric(ratio(b))))))),
  ];
}

const FIGURE_COLUMNS = ["candidate", "group", "token_ids", "delta", "ci_low", "ci_high", "ci_low_fdr", "ci_high_fdr", "p_value", "p_adjusted", "verdict_nominal", "verdict_fdr", "evidence", "per_1000", "lost", "won", "other"];

function figuresOf(data) {
  const names = benchmarksOf(data);
  const { chosen } = address();
  const benchmark = names.includes(chosen.benchmark) ? chosen.benchmark : names[0];
  const rule = ruleOf(data);
  const rows = data.rows.filter((r) => r.benchmark === benchmark && known(r.delta));
  const others = names.filter((name) => name !== benchmark);
  const other = others.includes(chosen.against) ? chosen.against : others[0];
  const few = [...rows].sort((a, b) => Math.abs(b.delta) - Math.abs(a.delta)).slice(0, 40);
  const many = rows.length > few.length;
  const set = (key, blank) => (value) => { choosing({ [key]: value === blank ? "" : value }); box.replaceWith((box = figuresOf(data))); };
  const search = el("input", {
    type: "search", list: "names", placeholder: "token or id", onchange: (event) => {
      const found = findCandidate(data, event.target.value);
      if (known(found)) location.hash = `#/candidate/${found}`;
      else event.target.setCustomValidity("no such candidate"), event.target.reportValidity();
    }, oninput: (event) => event.target.setCustomValidity(""),
  });
  const level = rule === "nominal" ? `rule nominal at ${data.run.alpha}` : `rule fdr at ${data.run.alpha}`;
  const draw = (name, label, some = rows, extra = {}) => plot(name, `${label}, ${benchmark}, ${level}`, some, { columns: FIGURE_COLUMNS, file: `${name}-${benchmark}`, ...extra });
  const raced = data.racing.flatMap((h) => Object.entries(h.active).flatMap(([group, n]) => n.map((running, s) => ({ series: `${h.benchmark}, ${GROUPS[group]}`, round: s + 1, running }))));
  const shrinks = data.racing.some((h) => Object.values(h.active).some((n) => new Set(n.filter((x) => x)).size > 1));
  const dose = data.doses.filter((d) => d.benchmark === benchmark);
  const pairs = data.pairs.filter((d) => d.benchmark === benchmark);
  const map = data.map.filter((cell) => cell.benchmark === benchmark);
  // The rows of the forest change often: nothing else is drawn anew with them.
  const forestOf = () => {
    const all = many && address().chosen.rows === "all";
    return el("div", { class: all ? "tall" : "" }, draw(`forest/${rule}`, "Forest plot", all ? rows : few));
  };
  const forest = el("div", {}, forestOf());
  let box = el("div", {},
    el("div", { class: "bar" },
      choose("benchmark", names.map((n) => [n, n]), benchmark, set("benchmark", names[0])),
      choose("rule", RULES, rule, set("rule", data.run.rule)),
      many ? choose("rows", [["few", `${few.length} largest |Δ|`], ["all", `all ${rows.length}`]], chosen.rows === "all" ? "all" : "few", (value) => {
        choosing({ rows: value === "few" ? "" : value });
        forest.replaceChildren(forestOf());
      }) : null,
      el("label", {}, el("span", {}, "go to candidate"), search),
      el("datalist", { id: "names" }, data.candidates.slice(0, 2000).map((c) => el("option", { value: c.name })))),
    figure("Δ with its interval", `By ${level}. An interval excludes 0 exactly where the verdict is strong. Wide band: the controls' Δ. Click a row for the candidate.`,
      forest),
    el("div", { class: "grid" },
      figure("Effect and evidence", `By ${level}.`, draw(`volcano/${rule}`, "Δ against minus log10 p")),
      figure("Effect and frequency", "Candidates that the baselines never emit are left out.", draw(`frequency/${rule}`, "Δ against frequency", rows.filter((r) => r.per_1000 > 0))),
      other ? figure("Agreement between benchmarks", "Equal axes; coloured by the verdict on the first.",
        others.length > 1 ? el("div", { class: "bar" }, choose("against", others.map((n) => [n, n]), other, set("against", others[0]))) : null,
        draw(`agreement/${benchmark}/${other}/${rule}`, `Δ on ${other} against Δ`, withOther(data, rows, other))) : null,
      figure("p-values", "Flat where nothing has an effect; a peak at the left is signal. A peak at 1: bans that changed no grade.", draw("p_values", "Histogram of p-values")),
      dose.length ? figure("Dose and response", "Δ against the strength of the penalty; the ban comes last.", draw("dose", "Dose-response curves", dose, { columns: null })) : null,
      shrinks ? figure("Racing", "Candidates that each round of seeds still knocked out.", plot("racing", "Candidates still running in each round of seeds", raced)) : null),
    pairs.length ? pairsBlock(data, benchmark, pairs) : null,
    map.length ? figure("Who wins and loses which problem", "Won minus lost seeds; pairs of problem and candidate that changed nothing are blank.", el("div", { class: "tall" }, draw("map", "Map of problems and candidates", map, { columns: null }))) : null);
  return box;
}

const PAIR_COLUMNS = [
  ["pair", (r) => toCandidate(r.c, r.pair), false], ["Δ first", (r) => signed(r.delta_first)], ["Δ second", (r) => signed(r.delta_second)],
  ["Δ pair", (r) => signed(r.delta_pair)], ["interaction", (r) => signed(r.interaction)], ["interval", (r) => span(r.ci_low, r.ci_high)],
  ["p", (r) => pvalue(r.p_value)], ["p adj.", (r) => pvalue(r.p_adjusted)], ["problems", (r) => count(r.n_problems)],
];

// Pairs: do two tokens stand in for each other (below 0), or do they lose the same answers (above 0)?
function pairsBlock(data, benchmark, pairs) {
  const ranked = [...pairs].sort((a, b) => Math.abs(b.interaction || 0) - Math.abs(a.interaction || 0));
  const few = ranked.slice(0, 40);
  // A matrix says more than a list only where tokens meet several others.
  const matrix = ["first", "second"].every((key) => new Set(pairs.map((r) => r[key])).size > 1);
  const level = `${percent(1 - data.run.alpha, 0)} intervals, not corrected`;
  return el("section", {}, el("h2", {}, "Pairs"),
    el("p", { class: "dim" }, `Interaction: Δ of the pair − Δ of its members. Below 0 each stands in for the other, above 0 they lose the same answers. ${level}; p adj. is Benjamini-Hochberg over the pairs of the benchmark.`),
    el("div", { class: "grid" },
      figure("Interactions", pairs.length > few.length ? `The ${few.length} largest of ${pairs.length}.` : null, plot("interactions", `Interactions of pairs, ${benchmark}, ${level}`, few, { file: `interactions-${benchmark}` })),
      matrix ? figure("Who stands in for whom", null, plot("interaction_map", `Interaction of every pair of tokens, ${benchmark}`, pairs, { file: `interaction_map-${benchmark}` })) : null),
    el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Interactions of pairs" }, el("table", {},
      el("thead", {}, el("tr", {}, PAIR_COLUMNS.map(([name, , n]) => el("th", { scope: "col", class: n === false ? null : "n" }, name)))),
      el("tbody", {}, ranked.map((r) => el("tr", {}, PAIR_COLUMNS.map(([, show, n]) => el("td", { class: n === false ? null : "n" }, show(r)))))))));
}

function withOther(data, rows, other) {
  const there = new Map(data.rows.filter((r) => r.benchmark === other && known(r.delta)).map((r) => [r.c, r.delta]));
  return rows.filter((r) => there.has(r.c)).map((r) => ({ ...r, other: there.get(r.c) }));
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
  const { findings } = data;
  return [
    el("h1", {}, findings.headline), state,
    findings.context.map((text) => el("p", {}, text)),
    findings.next.length ? el("div", { class: "note" }, el("strong", {}, "What to do next"), el("ul", {}, findings.next.map((text) => el("li", {}, text)))) : null,
    data.health.warnings.map((text) => el("p", { class: "warning" }, text)),
    data.run.has_tokenizer ? null : el("p", { class: "warning" }, "The model's tokenizer is not on this machine: tokens other than the candidates are shown as ids."),
    el("div", { class: "split" },
      data.rows.length ? el("section", {}, el("h2", {}, "Verdicts"), answerTable(data)) : null,
      el("section", {}, el("h2", {}, "Cost"), costTable(data))),
    data.rows.length ? [el("h2", {}, "Candidates"), figuresOf(data)] : null,
  ];
}
