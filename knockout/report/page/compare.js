// This run beside another: Δ against Δ, and every candidate's difference with its own test.

const COMPARED = [
  ["candidate", (r) => el("span", { class: "token" }, r.candidate)], ["change", (r) => r.change + (r.supported ? " ✓" : "")],
  ["Δ A", (r) => signed(r.delta_a)], ["Δ B", (r) => signed(r.delta_b)], ["B − A", (r) => signed(r.difference)],
  ["interval", (r) => span(r.ci_low, r.ci_high)], ["p adj.", (r) => pvalue(r.p_adjusted)],
  ["verdict A", (r) => said(r.verdict_a)], ["verdict B", (r) => said(r.verdict_b)], ["problems", (r) => count(r.n_problems)],
];
const COMPARED_WORDS = new Set(["candidate", "change", "verdict A", "verdict B"]);
const said = (verdict) => (verdict ? verdict.replace("strong_", "").replaceAll("_", " ") : "–");

function comparePage(data) {
  const { names, settings, rows, counts, alpha } = data.comparison;
  const benchmarks = Object.keys(counts);
  const { chosen } = address();
  const benchmark = benchmarks.includes(chosen.benchmark) ? chosen.benchmark : benchmarks[0];
  const own = rows.filter((r) => r.benchmark === benchmark);
  const { supported, ...changes } = counts[benchmark];
  const pick = (value) => { choosing({ benchmark: value }); show(false); };
  const kind = (name) => (COMPARED_WORDS.has(name) ? null : "n");
  const paired = own.some((r) => r.paired);
  return [
    el("h1", {}, `${names[0]} beside ${names[1]}`),
    el("p", {}, `A is ${names[0]}, B is ${names[1]}. On ${benchmark}: ${Object.entries(changes).map(([what, n]) => `${count(n)} ${what}`).join(", ")}; `
      + `${plural(supported, "difference")} significant after correction over the candidates (Benjamini-Hochberg at ${alpha}), marked ✓.`),
    el("p", { class: "dim" }, `That a candidate is called in one run only says little by itself: the difference B − A has its own ${paired ? "paired " : ""}test and ${percent(1 - alpha, 0)} interval (not corrected).`),
    el("h2", {}, "Settings that differ"),
    settings.length ? el("ul", {}, settings.map((line) => el("li", {}, line))) : el("p", {}, "None: the same model, prompts, sampling and run seed."),
    benchmarks.length > 1 ? el("div", { class: "bar" }, choose("benchmark", benchmarks.map((n) => [n, n]), benchmark, pick)) : null,
    el("h2", {}, "Differences"),
    figure("Δ in both runs", "Equal axes; on the diagonal nothing differs.", el("div", { class: "square" }, plot("comparison", `Δ in ${names[1]} against Δ in ${names[0]}, ${benchmark}`, own, { file: `comparison-${benchmark}` }))),
    el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Differences" }, el("table", {},
      el("thead", {}, el("tr", {}, COMPARED.map(([name]) => el("th", { scope: "col", class: kind(name) }, name)))),
      el("tbody", {}, own.map((r) => el("tr", {}, COMPARED.map(([name, cell]) => el("td", { class: kind(name) }, cell(r)))))))),
  ];
}
