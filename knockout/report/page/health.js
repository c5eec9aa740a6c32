// Whether the run can be trusted, and how to do it again.

function healthPage(data) {
  const { health } = data;
  const check = (name, part, whole, unit, note) => el("tr", {}, el("th", { scope: "row" }, name),
    numeric(count(part)), numeric(whole ? `of ${count(whole)} ${unit}` : `${unit}`), numeric(share(part, whole)), el("td", { class: "dim" }, note));
  const failures = health.cells_failed + health.forks_failed;
  const generated = data.benchmarks.reduce((n, b) => n + b.n_cells + b.forks, 0);
  const { canary } = health;
  const session = health.sessions.at(-1);
  const versions = session && session.engine ? session.engine.versions || {} : {};
  return [
    el("h1", {}, "Health of the run"),
    health.warnings.length ? health.warnings.map((text) => el("p", { class: "warning" }, text)) : el("p", {}, "Nothing suspicious was found."),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Checks" }, el("table", {}, el("tbody", {},
      check("coupling errors", health.coupling_errors, health.steps_checked, "forks", "A fork must begin with another token than the baseline has there; these do not."),
      check("fork errors", health.fork_errors, health.audited, "audits", "Knockouts that differ when they are generated again from scratch."),
      check("early forks", health.early_forks, health.forks, "forks", "Forked earlier than needed, because the answer did not fit; costs tokens, changes nothing."),
      check("unfinished", health.unfinished, generated, "trajectories", "Ran into max_tokens; such an answer is graded as it is."),
      check("grader time-outs", health.timeouts, generated, "answers", "Missing from the verdicts, not wrong."),
      check("failed", failures, generated + failures, "requests", "The engine failed; missing from the verdicts."),
      check("respelled", health.respelled, health.forks, "forks", "The text, encoded again, contains the banned token; the ids that were generated do not."),
      canary ? check("A/A forks", canary.forked, 0, "forks", `A ban of an id that cannot occur (${canary.candidate}); 0 is right.`) : null))),
    el("h2", {}, "By benchmark"),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Health by benchmark" }, el("table", {},
      el("thead", {}, el("tr", {}, ["benchmark", "metric", "mean length", "unfinished baselines", "unfinished forks", "their baselines", "not ok: baselines", "not ok: forks"].map((name, i) => el("th", { scope: "col", class: i > 1 && i < 6 ? "n" : null }, name)))),
      el("tbody", {}, data.benchmarks.map((b) => el("tr", {},
        el("th", { scope: "row" }, b.name), el("td", {}, b.metric), numeric(fixed(b.length, 0)),
        numeric(share(b.unfinished[0], b.n_cells)), numeric(share(b.unfinished[1], b.forks)), numeric(share(b.unfinished_at_fork, b.forks)),
        b.grades.map((of) => el("td", {}, Object.entries(of).filter(([s]) => s !== "ok").map(([s, n]) => `${s} ${count(n)}`).join(", ") || "–"))))))),
    el("h2", {}, "To do it again"),
    el("dl", {},
      el("dt", {}, "model"), el("dd", {}, data.run.model), el("dt", {}, "identity"), el("dd", {}, el("code", {}, data.run.identity)),
      el("dt", {}, "sampling"), el("dd", {}, Object.entries(data.run.sampling).map(([k, v]) => `${k} ${v ?? "the task's"}`).join(", ")),
      session ? [el("dt", {}, "engine"), el("dd", {}, session.engine ? [session.engine.kind, session.engine.device, session.engine.dtype, session.engine.runner].filter(Boolean).join(", ") : "–"),
        el("dt", {}, "versions"), el("dd", {}, [`knockout ${session.knockout}`, `Python ${session.python}`, ...Object.entries(versions).map(([k, v]) => `${k} ${v}`)].join(", "))] : null),
    el("details", { open: true }, el("summary", {}, "config.yaml"), el("pre", { tabindex: "0" }, data.config)),
    el("details", {}, el("summary", {}, plural(health.sessions.length, "session")), el("pre", { tabindex: "0" }, JSON.stringify(health.sessions, null, 2))),
  ];
}
