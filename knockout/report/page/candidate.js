// One candidate: its rows, what its forks look like, and its pairs of trajectories.

const OUTCOMES = { lost: "lost (right → wrong)", won: "won (wrong → right)", same: "same grade", ungraded: "not graded" };

function candidateRows(data, c) {
  const rows = data.rows.filter((r) => r.c === c);
  const columns = COLUMNS.filter(([key]) => !["candidate", "group"].includes(key) && (key.startsWith("key") || rows.some((r) => known(r[key]))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rows of this candidate" }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map(([key, name]) => el("th", { scope: "col", class: WORDS.has(key) ? null : "n" }, name)))),
    el("tbody", {}, rows.map((r) => el("tr", {}, columns.map(([key, , show]) => el("td", { class: WORDS.has(key) ? null : "n" }, show(r))))))));
}

// One bar for each pick that took the banned token's place, by what it did to the grade.
function replacedRows(replaced, banned) {
  const name = ([before, after]) => `${banned.length > 1 || !banned.includes(before) ? `${quoted(before)} → ` : ""}${quoted(after)}${banned.includes(before) ? "" : " †"}`;
  return replaced.top.flatMap((entry) => ["lost", "same", "won", "ungraded"].map((outcome, i) => ({ label: name(entry), outcome, forks: entry[3 + i] })).filter((row) => row.forks));
}

function benchmarkBlock(data, candidate, detail, b) {
  const benchmark = data.benchmarks[b];
  const [lost, same, won, ungraded] = detail.outcomes;
  const { length, step, unfinished } = detail;
  const quart = (q) => (q ? `${signed(q[1], 0)} (quartiles ${signed(q[0], 0)} and ${signed(q[2], 0)})` : "–");
  const partial = detail.replaced.n < detail.n ? `In ${count(detail.replaced.n)} of ${plural(detail.n, "fork")}. ` : "";
  const grades = Object.entries(detail.grades).filter(([status]) => status !== "ok");
  return el("section", {},
    el("h2", {}, benchmark.name),
    detail.n ? el("div", { class: "grid" },
      figure("What replaced it", `${partial}† the token itself was not the pick there: the ban moved the support.`, plot("replacements", `What replaced it on ${benchmark.name}`, replacedRows(detail.replaced, candidate.ids))),
      el("div", {},
        el("dl", {},
          el("dt", {}, "knockouts"), el("dd", {}, `${count(detail.n)} forked, ${count(detail.inherited)} inherited`),
          el("dt", {}, "grades"), el("dd", {}, `${count(lost)} lost, ${count(won)} won, ${count(same)} same${ungraded ? `, ${count(ungraded)} not graded` : ""}`),
          el("dt", {}, "length"), el("dd", {}, `${fixed(length.baseline, 0)} → ${fixed(length.knockout, 0)} tokens on average where it forked; median change ${quart(length.change)}`),
          el("dt", {}, "unfinished"), el("dd", {}, `${share(unfinished[0], detail.n)} → ${share(unfinished[1], detail.n)} ran into max_tokens`),
          el("dt", {}, "fork at"), el("dd", {}, `token ${count(step[1])} (median)`),
          grades.length ? [el("dt", {}, "grader said"), el("dd", {}, grades.map(([s, n]) => `${s}: ${count(n)}`).join(", "))] : null),
        figure("Where the forks begin", null, plot("where", `Where in the baseline the forks begin, ${benchmark.name}`, detail.where.map((forks, tenth) => ({ tenth, forks })))),
        figure("Change of length", null, plot("length", `Change of length after the fork, ${benchmark.name}`, detail.lengths)),
        detail.seeds.length > 1 ? figure("Δ by seed", null, plot("seeds", `Δ in each seed, ${benchmark.name}`, detail.seeds.map((row) => ({ benchmark: benchmark.name, ...row })))) : null),
    ) : el("p", { class: "dim" }, `No knockout left its baseline here; ${count(detail.inherited)} are inherited.`));
}

function pairList(data, c, found) {
  const there = new Map(found.pairs.map((pair) => [pair.key.join(), pair]));
  const all = found.pairs.map((pair) => ({ key: pair.key, outcome: pair.outcome, step: pair.step }));
  found.details.forEach((detail, b) => {
    for (const outcome of ["lost", "won"]) {
      for (const [p, s] of detail[outcome]) {
        const key = [b, p, s, c];
        if (!there.has(key.join())) all.push({ key, outcome, step: null });
      }
    }
  });
  const order = Object.keys(OUTCOMES);
  all.sort((x, y) => order.indexOf(x.outcome) - order.indexOf(y.outcome) || x.key[0] - y.key[0] || x.key[1] - y.key[1] || x.key[2] - y.key[2]);
  const body = el("tbody");
  const said = el("span", { class: "dim", role: "status" });
  const most = 400;
  const fill = (outcome) => {
    const shown = all.filter((pair) => !outcome || pair.outcome === outcome);
    const missing = shown.filter((pair) => !there.has(pair.key.join())).length;
    const forks = found.details.reduce((n, detail) => n + (outcome ? detail.outcomes[{ lost: 0, same: 1, won: 2, ungraded: 3 }[outcome]] : detail.n), 0);
    const open = shown.length - missing;
    said.textContent = `${plural(forks, "fork")}; ${open < forks ? `${count(open)} can be opened here${settings.live ? "" : " (`knockout view` shows all)"}` : "all can be opened"}`
      + (shown.length > most ? `; the first ${most} are listed` : "");
    body.replaceChildren(...shown.slice(0, most).map(({ key, outcome: kind, step }) => {
      const name = data.benchmarks[key[0]].doc_ids[key[1]];
      return el("tr", {}, el("td", {}, data.benchmarks[key[0]].name),
        el("td", {}, there.has(key.join()) ? el("a", { href: `#/pair/${key.join("/")}` }, name) : name),
        numeric(count(key[2])), el("td", {}, OUTCOMES[kind]), numeric(known(step) ? count(step) : "–"));
    }));
  };
  fill("");
  return el("section", {}, el("h2", {}, "Trajectories"),
    el("div", { class: "bar" },
      choose("grade", [["", "all"], ...Object.entries(OUTCOMES).filter(([k]) => all.some((p) => p.outcome === k))], "", fill), said),
    el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Trajectories" }, el("table", {},
      el("thead", {}, el("tr", {}, ["benchmark", "problem", "seed", "grade", "fork at"].map((name, i) => el("th", { scope: "col", class: i === 2 || i === 4 ? "n" : null }, name)))), body)));
}

async function candidatePage(data, [at]) {
  const c = Number(at);
  const candidate = data.candidates[c];
  const found = candidate && await source.candidate(c);
  if (!found) return [el("h1", {}, "No such candidate")];
  const step = (n, text) => (data.candidates[c + n] ? el("a", { href: `#/candidate/${c + n}` }, text) : null);
  return [
    el("p", { class: "dim" }, step(-1, "← previous"), " ", step(1, "next →")),
    el("h1", {}, el("span", { class: "token" }, candidate.name), el("span", { class: "dim" }, ` ${GROUPS[candidate.group].replace(/s$/, "")}`)),
    el("p", { class: "dim" }, candidate.ids.length > 1
      ? ["Banned together: ", candidate.ids.map((id, i) => [el("span", { class: "token" }, candidate.tokens[i]), ` ${id}  `])]
      : `Token id ${candidate.ids[0]}`),
    candidateRows(data, c),
    found.details.map((detail, b) => benchmarkBlock(data, candidate, detail, b)),
    pairList(data, c, found),
  ];
}
