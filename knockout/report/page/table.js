// All rows of the verdict table: search, filter, sort, choose columns, download. All of it is in the address.

const COLUMNS = [
  ["candidate", "candidate", (r) => toCandidate(r.c, r.candidate)],
  ["key", "verdict", (r) => el("span", { title: r.reason || null }, badge(r.key), r.few_carry ? el("span", { class: "dim", title: `${plural(r.n_carrying, "problem")} make up half of the sum` }, " few") : null)],
  ["delta", "Δ", (r) => signed(r.delta)],
  ["ci_low", "interval", (r) => span(r.ci_low, r.ci_high)],
  ["ci_low_fdr", "fdr interval", (r) => span(r.ci_low_fdr, r.ci_high_fdr)],
  ["p_value", "p", (r) => pvalue(r.p_value)],
  ["p_adjusted", "p adj.", (r) => pvalue(r.p_adjusted)],
  ["p_bounded", "p bounded", (r) => pvalue(r.p_bounded)],
  ["key_nominal", "nominal", (r) => badge(r.key_nominal)],
  ["key_fdr", "fdr", (r) => badge(r.key_fdr)],
  ["benchmark", "benchmark", (r) => r.benchmark],
  ["group", "group", (r) => r.group],
  ["pass1_knockout", "Pass@1", (r) => percent(r.pass1_knockout)],
  ["mde", "mde", (r) => fixed(r.mde, 3)],
  ["lost", "lost", (r) => count(r.lost)],
  ["won", "won", (r) => count(r.won)],
  ["n_forked", "forked", (r) => share(r.n_forked, r.n_forked + r.n_inherited)],
  ["n_seeds", "seeds", (r) => count(r.n_seeds)],
  ["n_missing", "missing", (r) => count(r.n_missing)],
  ["settled_round", "settled", (r) => (r.settled_round ? `round ${r.settled_round}` : "–")],
  ["per_1000", "per 1,000", (r) => (known(r.per_1000) && r.per_1000 > 0 ? Number(r.per_1000.toPrecision(2)).toString() : "0")],
];
const USUAL = ["candidate", "key", "delta", "ci_low", "p_value", "p_adjusted", "benchmark", "group", "pass1_knockout", "lost", "won", "n_forked"];
const PINNED = ["candidate", "key"];
const WORDS = new Set(["candidate", "group", "benchmark", "key", "key_nominal", "key_fdr"]);
const INNER = /^(b|c|key.*|low_.*|high_.*|level_.*)$/;
const TALL = 27; // pixels of a row; the style sheet sets the same
const span = (low, high) => (known(low) ? `[${signed(low)}, ${signed(high)}]` : "–");

function filtered(data, chosen) {
  const text = (chosen.q || "").trim().toLowerCase();
  const rows = data.rows.filter((r) => (!chosen.benchmark || r.benchmark === chosen.benchmark)
    && (!chosen.group || r.group === chosen.group) && (!chosen.verdict || r.key === chosen.verdict)
    && (!text || r.candidate.toLowerCase().includes(text) || r.token_ids.some((id) => String(id) === text)));
  const column = chosen.sort || "p_value";
  const sense = chosen.down ? -1 : 1;
  const order = Object.keys(VERDICTS);
  const value = (r) => (column.startsWith("key") ? order.indexOf(r[column]) : column === "n_forked" ? r.n_forked / (r.n_forked + r.n_inherited) : r[column]);
  const keyed = rows.map((row) => [value(row), row]);
  keyed.sort(([x, a], [y, b]) => {
    if (!known(x) || !known(y)) return known(y) - known(x) || a.c - b.c;
    return sense * (typeof x === "string" ? (x < y ? -1 : x > y ? 1 : 0) : x - y) || a.c - b.c;
  });
  return keyed.map(([, row]) => row);
}

// Draws only the rows that can be seen; a printer gets all of them.
function rowWindow(box, body, make) {
  let rows = [];
  let from = -1;
  let to = -1;
  const filler = (n) => el("tr", { class: "filler", "aria-hidden": "true" }, el("td", { style: `height: ${n * TALL}px` }));
  const draw = (all = false) => {
    const first = all ? 0 : Math.max(0, Math.floor(box.scrollTop / TALL) - 15);
    const last = all ? rows.length : Math.min(rows.length, first + Math.ceil((box.clientHeight || 800) / TALL) + 30);
    if (first === from && last === to) return;
    [from, to] = [first, last];
    body.replaceChildren(filler(first), ...rows.slice(first, last).map(make), filler(rows.length - last));
  };
  box.addEventListener("scroll", () => draw(), { passive: true });
  addEventListener("beforeprint", () => box.isConnected && draw(true));
  addEventListener("afterprint", () => { from = -1; if (box.isConnected) draw(); });
  return (next) => { rows = next; from = -1; box.scrollTop = 0; draw(); };
}

function columnsOf(data, chosen) {
  const there = COLUMNS.filter(([key]) => key.startsWith("key") || key === "per_1000" || data.rows.some((r) => known(r[key])));
  const kept = (chosen.columns || keep.get("columns") || USUAL.join(",")).split(",");
  return [there, there.filter(([key]) => PINNED.includes(key) || kept.includes(key))];
}

function tablePage(data) {
  const names = benchmarksOf(data);
  const said = el("span", { class: "dim", role: "status" });
  const body = el("tbody");
  const head = el("thead");
  const box = el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Verdict table" }, el("table", { class: "wide rows" }, head, body));
  let columns = [];
  let rows = [];
  const set = rowWindow(box, body, (r) => el("tr", {}, columns.map(([key, , show]) => el("td", { class: cellClass(key) }, show(r)))));
  const cellClass = (key) => [WORDS.has(key) ? "" : "n", PINNED.includes(key) ? `pin ${key}` : ""].join(" ").trim() || null;
  const fill = () => {
    const { chosen } = address();
    let there;
    [there, columns] = columnsOf(data, chosen);
    rows = filtered(data, chosen);
    said.textContent = `${count(rows.length)} of ${plural(data.rows.length, "row")}`;
    const sorted = chosen.sort || "p_value";
    head.replaceChildren(el("tr", {}, columns.map(([key, name]) => el("th", {
      scope: "col", class: cellClass(key), "aria-sort": key === sorted ? (chosen.down ? "descending" : "ascending") : null,
    }, el("button", { type: "button", onclick: () => { choosing({ sort: key, down: key === sorted && !chosen.down ? 1 : "" }); fill(); byId(`sort-${key}`).focus(); }, id: `sort-${key}` },
      name + (key === sorted ? (chosen.down ? " ↓" : " ↑") : ""))))));
    set(rows);
    const picked = new Set(columns.map(([key]) => key));
    picker.replaceChildren(...there.filter(([key]) => !PINNED.includes(key)).map(([key, name]) => el("label", {}, el("input", {
      type: "checkbox", checked: picked.has(key), onchange: (event) => {
        const next = there.map(([k]) => k).filter((k) => (k === key ? event.target.checked : picked.has(k)));
        keep.set("columns", next.join(","));
        choosing({ columns: next.join(",") });
        fill();
      },
    }), ` ${name}`)));
  };
  const choice = (key) => (value) => { choosing({ [key]: value }); fill(); };
  const picker = el("div", { class: "picker" });
  const { chosen } = address();
  const page = [
    el("h1", {}, "All rows"),
    el("div", { class: "bar" },
      el("label", {}, el("span", {}, "search"), el("input", { type: "search", id: "search", value: chosen.q || "", placeholder: "token or id", oninput: (e) => choice("q")(e.target.value) })),
      choose("benchmark", [["", "all"], ...names.map((n) => [n, n])], chosen.benchmark || "", choice("benchmark")),
      choose("group", [["", "all"], ...Object.entries(GROUPS)], chosen.group || "", choice("group")),
      choose("verdict", [["", "all"], ...Object.entries(VERDICTS).map(([k, v]) => [k, v.name])], chosen.verdict || "", choice("verdict")),
      el("details", { class: "columns" }, el("summary", {}, "columns"), picker),
      said,
      el("button", { type: "button", class: "end", id: "csv", onclick: () => download("verdicts.csv", "text/csv", csv(rows.map(outer))) }, "Download CSV")),
    el("p", { class: "dim" }, `Verdict by rule ${data.run.rule} at α = ${data.run.alpha}; interval: ${percent(1 - data.run.alpha, 0)}, not corrected.`),
    box,
  ];
  fill();
  return page;
}
const outer = (row) => Object.fromEntries(Object.entries(row).filter(([key]) => !INNER.test(key)));
