// A baseline and a knockout, token by token.

const FIRST_SHARED = 150; // tokens of a long shared prefix that are shown before the fork
const FIRST_REST = 1500;
const MORE = 5000;
const BLOCK = 400;

function showToken(id, step, banned, joined = null) {
  const [text, kind] = joined === null ? texts.get(id) || [`#${id}`, 2] : [joined, 0];
  const node = el("span", { class: `t${kind ? " c" : ""}${banned.has(id) ? " banned" : ""}`, "data-step": step, "data-id": id });
  if (kind) {
    node.append(text);
    return node;
  }
  let plain = "";
  const flush = () => { if (plain) node.append(plain); plain = ""; };
  // What is copied is the text itself: signs for white space are drawn by the style sheet.
  const sign = (kind, real) => { flush(); node.append(el("i", { class: kind }, real)); };
  for (const character of text) {
    if (character === " ") sign("sp", " ");
    else if (character === "\n") sign("nl", "\n");
    else if (character === "\t") sign("tab", "\t");
    else if (UNSEEN.test(character)) sign("esc", escaped(character));
    else plain += character;
  }
  flush();
  return node;
}

// Tokens in blocks, so that the browser lays out only what is on screen; long rests on demand.
// `joined` maps a step to [count, text] where several tokens make one character; `same` says which tokens both
// sides share.
function tokenRun(ids, from, banned, { label, first = FIRST_REST, forkAt = -1, joined = new Map(), same = null }) {
  const box = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": label });
  const grow = (start, end) => {
    for (let i = start; i < end; i += BLOCK) {
      const block = el("span", { class: ids.length > BLOCK ? "block" : "block inline" });
      for (let j = i; j < Math.min(i + BLOCK, end); j += 1) {
        const [n, text] = joined.get(from + j) || [1, null];
        const token = showToken(ids[j], from + j, banned, text);
        if (n > 1) token.title = `${n} tokens: ${ids.slice(j, j + n).join(", ")}`;
        if (from + j === forkAt) token.classList.add("fork");
        else if (same?.[j]) token.classList.add("same");
        block.append(token);
        j += n - 1;
      }
      box.append(block);
    }
    const left = ids.length - end;
    if (left > 0) {
      const more = el("button", { type: "button", onclick: () => { more.remove(); grow(end, Math.min(end + MORE, ids.length)); } }, `show more (${plural(left, "token")} left)`);
      box.append(more);
    }
  };
  grow(0, Math.min(first, ids.length));
  return box;
}

function sharedRun(ids, banned, joined) {
  const shown = ids.slice(-FIRST_SHARED);
  const hidden = ids.length - shown.length;
  const box = el("div", { class: "shared" });
  const last = tokenRun(shown, hidden, banned, { label: "shared prefix", joined });
  if (hidden) {
    const button = el("button", { type: "button", onclick: () => box.replaceChildren(tokenRun(ids, 0, banned, { label: "shared prefix", first: Infinity, joined })) }, `show ${plural(hidden, "earlier token")}`);
    box.append(button);
  }
  box.append(last);
  return box;
}

// Which tokens of two continuations are the same in the same order (a longest common subsequence).
const LONGEST_DIFF = 1500;
function alignment(one, other) {
  const [a, b] = [one.slice(0, LONGEST_DIFF), other.slice(0, LONGEST_DIFF)];
  const width = b.length + 1;
  const best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      best[i * width + j] = a[i] === b[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  const [left, right] = [new Uint8Array(one.length), new Uint8Array(other.length)];
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) { left[i] = right[j] = 1; i += 1; j += 1; }
    else if (best[(i + 1) * width + j] >= best[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return [left, right];
}

function convergence(left, right) {
  let tail = 0;
  while (tail < Math.min(left.length, right.length) && left.at(-1 - tail) && right.at(-1 - tail)) tail += 1;
  const shared = left.reduce((n, x) => n + x, 0);
  const text = `After the fork ${count(shared)} of ${plural(left.length, "token")} of the baseline come again in the knockout (dim).`;
  return tail > 1 ? `${text} The two end in the same ${plural(tail, "token")}.` : text;
}

function gradeLine(side, total) {
  const word = side.correct === 1 ? "right" : side.correct === 0 ? "wrong" : "not graded";
  const extra = side.grade && side.grade !== "ok" ? ` (${side.grade})` : "";
  const end = { stop: "ended by itself", length: "ran into max_tokens", error: "failed" }[side.finish] || side.finish;
  return el("p", {}, el("span", { class: `grade ${word}` }, `${{ right: "✓", wrong: "✗" }[word] || "–"} ${word}${extra}`),
    ` ${plural(total, "token")}, ${end}. `,
    known(side.extracted) ? ["Answer: ", el("span", { class: "answer" }, visible(clip(side.extracted, 300)))] : null,
    side.error ? el("span", { class: "warning" }, visible(side.error)) : null);
}

function statusLine(page, onpick) {
  const text = el("span", { role: "status" }, "Point at a token, or move through them with the arrow keys.");
  const line = el("div", { class: "status" }, text);
  let active = null;
  const pick = (token, scroll) => {
    if (active) active.classList.remove("active");
    active = token;
    token.classList.add("active");
    if (scroll) token.scrollIntoView({ block: "nearest" });
    text.replaceChildren("step ", count(Number(token.dataset.step)), ": ", el("span", { class: "token" }, quoted(Number(token.dataset.id))), ` id ${token.dataset.id}`);
  };
  page.addEventListener("mouseover", (event) => {
    const token = event.target.closest(".t");
    if (token && !line.dataset.held) pick(token, false);
  });
  page.addEventListener("click", (event) => {
    const token = event.target.closest(".t");
    if (token) { pick(token, false); if (onpick) onpick(token, line); }
  });
  page.addEventListener("keydown", (event) => {
    if (!event.target.classList.contains("tokens")) return;
    const all = [...event.target.querySelectorAll(".t")];
    const at = all.indexOf(active);
    const to = { ArrowRight: at + 1, ArrowLeft: at < 0 ? 0 : at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to !== undefined && all[to]) { event.preventDefault(); pick(all[to], true); }
    if (event.key === "Enter" && active && onpick) { event.preventDefault(); onpick(active, line); }
  });
  return line;
}

// What the model thought at the fork: the best tokens of both arms, and how close the picks were.
function picksBlock(picks, banned, name) {
  if (!picks) {
    return el("p", { class: "dim" }, "How likely the picks at the fork were is not stored by a run; ",
      el("code", {}, "knockout report DIR --picks"), " measures it with the run's model.");
  }
  const arms = [["Baseline", picks.baseline], [`Without ${name}`, picks.knockout]];
  const tokens = [...new Set(arms.flatMap(([, arm]) => [...arm.best.slice(0, 6).map(([id]) => id), arm.pick]))];
  const of = (arm, id) => arm.best.find(([token]) => token === id)?.[1] ?? (id === arm.pick ? arm.probability : null);
  tokens.sort((x, y) => (of(picks.baseline, y) || 0) - (of(picks.baseline, x) || 0) || (of(picks.knockout, y) || 0) - (of(picks.knockout, x) || 0));
  const bar = (p) => { const node = el("span", { class: "meter", "aria-hidden": "true" }); node.style.width = `${100 * (p || 0)}%`; return node; };
  const close = ([title, arm]) => el("li", {}, `${title}: `, el("span", { class: "token" }, quoted(arm.pick)),
    known(arm.runner_up) ? [` was picked before `, el("span", { class: "token" }, quoted(arm.runner_up)), ` by ${fixed(arm.margin, 2)} (noise included, in units of logit / temperature). `] : " was the only token left. ",
    known(arm.noise_free) ? (arm.noise_free >= 0 ? `Without noise it leads by ${fixed(arm.noise_free, 2)} logits.` : `Without noise it is ${fixed(-arm.noise_free, 2)} logits behind the best token: the noise chose it.`) : null,
    arm.agrees ? null : el("span", { class: "warning" }, ` This pass rounds otherwise than the run: there it was `, el("span", { class: "token" }, quoted(arm.emitted)), "."));
  return el("section", { class: "picks" },
    el("h2", {}, "At the fork"),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Probabilities at the fork" }, el("table", {},
      el("caption", { class: "dim" }, "Probabilities after temperature and truncation; ● was picked."),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "token"), arms.map(([title]) => el("th", { scope: "col", class: "n" }, title)))),
      el("tbody", {}, tokens.map((id) => el("tr", {},
        el("th", { scope: "row" }, el("span", { class: `token${banned.has(id) ? " banned" : ""}` }, quoted(id))),
        arms.map(([, arm]) => numeric(arm.pick === id ? "● " : "", percent(of(arm, id)), bar(of(arm, id))))))))),
    el("ul", {}, arms.map(close)));
}

// Links to the pairs before and behind this one, of the candidate's pairs in the order of its page.
function neighbours(key, of) {
  const pairs = of?.pairs || [];
  const at = pairs.findIndex((pair) => pair.key.join() === key.join());
  if (at < 0) return null;
  const link = (pair, text) => (pair ? ["  ", el("a", { href: `#/pair/${pair.key.join("/")}` }, text)] : null);
  const next = (outcome) => pairs.slice(at + 1).concat(pairs.slice(0, at)).find((pair) => pair.outcome === outcome);
  return [`  ${at + 1} of ${pairs.length} `, link(pairs[at - 1], "← previous"), link(pairs[at + 1], "next →"),
    ["lost", "won", "same"].map((outcome) => link(next(outcome), `next ${outcome}`))];
}

async function pairPage(data, parts) {
  const key = parts.map(Number);
  const found = await source.pair(key);
  if (!found) return [el("h1", {}, "This pair is not here"), el("p", {}, "The report's file holds a sample of the trajectories; `knockout view` shows all of them.")];
  const { problem, baseline, knockout, picks } = found;
  const of = data.candidates[key[3]] ? await source.candidate(key[3]) : null;
  const candidate = data.candidates[key[3]];
  const banned = new Set(candidate ? candidate.ids : []);
  const name = `${data.benchmarks[key[0]].name} · ${problem.doc_id} · seed ${key[2]}`;
  const step = knockout ? knockout.step : baseline.ids.length;
  const shared = baseline.ids.slice(0, step);
  const base = baseline.ids.slice(step);
  const page = el("div");
  const add = (...nodes) => page.append(...nodes.filter((node) => node));
  const join = (side) => new Map((side?.joined || []).map(([at, n, text]) => [at, [n, text]]));
  const [left, right] = knockout ? alignment(base, knockout.ids) : [null, null];
  const column = (title, side, ids, which, same) => el("section", { class: "side", "data-side": which },
    el("h3", {}, title), gradeLine(side, step + ids.length),
    tokenRun(ids, step, banned, { label: title, forkAt: step, joined: join(side), same }));
  add(
    el("p", { class: "dim" }, candidate ? [el("a", { href: `#/candidate/${key[3]}` }, "↑ ", el("span", { class: "token" }, candidate.name)), neighbours(key, of)] : null),
    el("h1", {}, name),
    el("details", {}, el("summary", {}, `Prompt (${plural(problem.ids.length, "token")})`), el("pre", { tabindex: "0" }, visible(problem.prompt))),
    problem.gold ? el("p", {}, "Right answer: ", el("span", { class: "answer" }, visible(clip(problem.gold, 600)))) : null,
    el("h2", {}, knockout ? `Shared prefix (${plural(step, "token")})` : "Baseline"),
    knockout ? null : gradeLine(baseline, baseline.ids.length),
    el("section", { "data-side": "baseline" }, knockout ? sharedRun(shared, banned, join(baseline)) : tokenRun(shared, 0, banned, { label: "baseline", joined: join(baseline) })),
  );
  if (knockout) {
    page.append(
      el("div", { class: "forkline" }, el("span", {}, `fork at step ${count(step)}: `, el("span", { class: "token" }, quoted(base.length ? base[0] : -1)), " → ", el("span", { class: "token" }, quoted(knockout.ids.length ? knockout.ids[0] : -1)))),
      picksBlock(picks, banned, clip(candidate.name, 40)),
      el("h2", {}, "After the fork"),
      el("p", { class: "dim" }, convergence(left, right)),
      el("div", { class: "pair" },
        column("Baseline", baseline, base, "baseline", left),
        column(`Without ${clip(candidate.name, 40)}`, knockout, knockout.ids, "knockout", right)));
  }
  const explorer = settings.explore ? exploreFrom(found, page) : null;
  page.append(statusLine(page, explorer));
  if (settings.explore) {
    const jobs = jobList();
    page.insertBefore(jobs, page.querySelector(".status"));
    requestAnimationFrame(() => { jobs.refresh(); exploredBefore(found, page); });
  }
  return [page];
}
