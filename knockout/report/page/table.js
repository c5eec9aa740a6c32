// All rows of the verdict table: filter, sort, download.

const COLUMNS = [
  ["candidate", "candidate", (r) => toCandidate(r.c, r.candidate)],
  ["group", "group", (r) => r.group],
  ["benchmark", "benchmark", (r) => r.benchmark],
  ["pass1_knockout", "Pass@1", (r) => percent(r.pass1_knockout)],
  ["delta", "Δ", (r) => signed(r.delta)],
  ["ci_low", "interval", (r) => (known(r.ci_low) ? `[${signed(r.ci_low)}, ${signed(r.ci_high)}]` : "–")],
  ["p_value", "p", (r) => pvalue(r.p_value)],
  ["p_adjusted", "p adj.", (r) => pvalue(r.p_adjusted)],
  ["mde", "smallest visible", (r) => fixed(r.mde, 3)],
  ["lost", "lost", (r) => count(r.lost)],
  ["won", "won", (r) => count(r.won)],
  ["n_forked", "forked", (r) => share(r.n_forked, r.n_forked + r.n_inherited)],
  ["n_seeds", "seeds", (r) => count(r.n_seeds)],
  ["settled_round", "settled", (r) => (r.settled_round ? `round ${r.settled_round}` : "–")],
  ["per_1000", "per 1,000", (r) => known(r.per_1000) && r.per_1000 > 0 ? Number(r.per_1000.toPrecision(2)).toString() : "0"],
  ["key", "verdict", (r) => el("span", { title: r.reason || null }, badge(r.key))],
];
const WORDS = new Set(["candidate", "group", "benchmark", "key"]);
const INNER = new Set(["b", "c", "key", "key_nominal", "key_fdr"]);
const filter = { text: "", benchmark: "", group: "", key: "", column: "p_value", down: false };

function filtered(data) {
  const text = filter.text.trim().toLowerCase();
  const rows = data.rows.filter((r) => (!filter.benchmark || r.benchmark === filter.benchmark)
    && (!filter.group || r.group === filter.group) && (!filter.key || r.key === filter.key)
    && (!text || r.candidate.toLowerCase().includes(text) || r.token_ids.some((id) => String(id) === text)));
  const { column } = filter;
  const sense = filter.down ? -1 : 1;
  const order = Object.keys(VERDICTS);
  const value = (r) => (column === "key" ? order.indexOf(r.key) : column === "n_forked" ? r.n_forked / (r.n_forked + r.n_inherited) : r[column]);
  return rows.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (!known(x) || !known(y)) return known(y) - known(x);
    return sense * (typeof x === "string" ? x.localeCompare(y) : x - y) || a.c - b.c;
  });
}

function csv(rows) {
  const columns = Object.keys(rows[0] || {}).filter((key) => !INNER.has(key));
  const cell = (value) => {
    const text = value === null ? "" : Array.isArray(value) ? JSON.stringify(value) : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows.map((r) => columns.map((key) => r[key]))].map((line) => line.map(cell).join(",")).join("\n") + "\n";
}

function download(name, type, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function tablePage(data, [benchmark, group] = []) {
  if (benchmark) Object.assign(filter, { benchmark: decodeURIComponent(benchmark), group: group || "", key: "", text: "" });
  const names = benchmarksOf(data);
  const body = el("tbody");
  const said = el("span", { class: "dim", role: "status" });
  const heads = COLUMNS.map(([key, name]) => el("th", { scope: "col", class: WORDS.has(key) ? null : "n" },
    el("button", { type: "button", onclick: () => {
      if (filter.column === key) filter.down = !filter.down;
      else Object.assign(filter, { column: key, down: false });
      fill();
    } }, name)));
  let rows = [];
  const fill = () => {
    rows = filtered(data);
    said.textContent = `${count(rows.length)} of ${plural(data.rows.length, "row")}`;
    heads.forEach((head, i) => {
      const [key, name] = COLUMNS[i];
      const own = key === filter.column;
      own ? head.setAttribute("aria-sort", filter.down ? "descending" : "ascending") : head.removeAttribute("aria-sort");
      head.firstChild.textContent = name + (own ? (filter.down ? " ↓" : " ↑") : "");
    });
    body.replaceChildren(...rows.map((r) => el("tr", {}, COLUMNS.map(([key, , show]) => el("td", { class: WORDS.has(key) ? null : "n" }, show(r))))));
  };
  const set = (key) => (value) => { filter[key] = value; fill(); };
  const page = [
    el("h1", {}, "All rows"),
    el("div", { class: "bar" },
      el("label", {}, el("span", {}, "search"), el("input", { type: "search", id: "search", value: filter.text, placeholder: "token or id", oninput: (e) => set("text")(e.target.value) })),
      choose("benchmark", [["", "all"], ...names.map((n) => [n, n])], filter.benchmark, set("benchmark")),
      choose("group", [["", "all"], ...Object.entries(GROUPS)], filter.group, set("group")),
      choose("verdict", [["", "all"], ...Object.entries(VERDICTS).map(([k, v]) => [k, v.name])], filter.key, set("key")),
      said,
      el("button", { type: "button", class: "end", id: "csv", onclick: () => download("verdicts.csv", "text/csv", csv(rows)) }, "Download CSV")),
    el("div", { class: "scroll tall" }, el("table", { class: "wide" }, el("thead", {}, el("tr", {}, heads)), body)),
  ];
  fill();
  return page;
}
