// Plots, all by plotly.js. Its labels know a little markup, so text is escaped before it gets there.

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const safe = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const SYMBOLS = { candidate: "circle", control: "diamond-open", canary: "x-thin-open" };
const drawn = new Set();

function plot(height, label, make) {
  const box = el("div", { class: "plot", role: "img", "aria-label": label });
  box.style.minHeight = `${height}px`;
  const draw = () => {
    const { traces, layout, click } = make();
    const axis = {
      gridcolor: style("--line"), zerolinecolor: style("--dim"), linecolor: style("--line"),
      automargin: true, fixedrange: false, tickfont: { size: 11.5 }, title: { standoff: 6 },
    };
    const base = {
      height, margin: { l: 52, r: 12, t: 8, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, DejaVu Sans, sans-serif", size: 12, color: style("--ink") },
      hoverlabel: { bgcolor: style("--paper"), bordercolor: style("--dim"), font: { color: style("--ink"), size: 12 }, align: "left" },
      showlegend: false, bargap: 0.08, dragmode: "zoom", ...layout,
      xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    };
    Plotly.react(box, traces, base, {
      responsive: true, displaylogo: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    });
    box.removeAllListeners("plotly_click");
    if (click) {
      box.on("plotly_click", (event) => {
        const c = event.points[0].customdata;
        if (known(c)) location.hash = `#/candidate/${c}`;
      });
    }
  };
  drawn.add({ box, draw });
  requestAnimationFrame(() => box.isConnected && draw());
  return box;
}
const redraw = () => {
  for (const item of drawn) item.box.isConnected ? item.draw() : drawn.delete(item);
};

const hover = (row) => safe(clip(row.candidate, 48))
  + `<br>Δ ${signed(row.delta)} [${signed(row.ci_low)}, ${signed(row.ci_high)}]`
  + `<br>p ${pvalue(row.p_value)} · adjusted ${pvalue(row.p_adjusted)}`
  + `<br>${VERDICTS[row.key].name} · ${GROUPS[row.group]}`
  + `<br>${row.lost} lost, ${row.won} won`;

// One trace for each verdict and group, so that colour and shape can be told apart and named.
function byKind(rows, x, y, extra = () => ({})) {
  const traces = [];
  for (const key of Object.keys(VERDICTS)) {
    for (const group of Object.keys(GROUPS)) {
      const own = rows.filter((r) => r.key === key && r.group === group);
      if (!own.length) continue;
      traces.push({
        type: "scatter", mode: "markers", x: own.map(x), y: own.map(y),
        customdata: own.map((r) => r.c), hovertext: own.map(hover), hoverinfo: "text",
        name: `${VERDICTS[key].short}, ${GROUPS[group]}`,
        marker: { color: style(`--${key}`), symbol: SYMBOLS[group], size: 7, line: { width: group === "candidate" ? 0 : 1.5, color: style(`--${key}`) } },
        ...extra(own, key),
      });
    }
  }
  return traces;
}

function forest(rows) {
  const sorted = [...rows].sort((a, b) => b.delta - a.delta || b.c - a.c);
  const place = new Map(sorted.map((row, i) => [row, i]));
  const height = 70 + 17 * sorted.length;
  return plot(height, `Forest plot of ${plural(sorted.length, "row")}; the table has the same numbers`, () => ({
    click: true,
    traces: byKind(sorted, (r) => r.delta, (r) => place.get(r), (own, key) => ({
      error_x: {
        type: "data", symmetric: false, thickness: 1.2, width: 0, color: style(`--${key}`),
        array: own.map((r) => (known(r.ci_high) ? r.ci_high - r.delta : 0)),
        arrayminus: own.map((r) => (known(r.ci_low) ? r.delta - r.ci_low : 0)),
      },
    })),
    layout: {
      margin: { l: 60, r: 12, t: 34, b: 30 }, hovermode: "closest",
      xaxis: { side: "top", zeroline: true, title: { text: "Δ Pass@1", standoff: 4 }, tickformat: ".3~f" },
      yaxis: {
        tickvals: sorted.map((_, i) => i), ticktext: sorted.map((r) => safe(clip(r.candidate, innerWidth < 760 ? 14 : 28))),
        range: [-0.8, sorted.length - 0.2], showgrid: false, zeroline: false, fixedrange: true,
        tickfont: { size: 11, family: "ui-monospace, DejaVu Sans Mono, monospace" },
      },
    },
  }));
}

function volcano(rows, alpha) {
  const own = rows.filter((r) => known(r.p_value) && r.p_value > 0);
  return plot(300, "Δ against minus log10 p", () => ({
    click: true, traces: byKind(own, (r) => r.delta, (r) => -Math.log10(r.p_value)),
    layout: {
      hovermode: "closest",
      xaxis: { title: { text: "Δ Pass@1", standoff: 6 }, zeroline: true, tickformat: ".3~f" },
      yaxis: { title: { text: "−log₁₀ p", standoff: 6 }, rangemode: "tozero", zeroline: false },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: -Math.log10(alpha), y1: -Math.log10(alpha), line: { dash: "dot", width: 1, color: style("--dim") } }],
    },
  }));
}

function againstFrequency(rows) {
  const own = rows.filter((r) => r.per_1000 > 0);
  return plot(300, "Δ against frequency in the baselines", () => ({
    click: true, traces: byKind(own, (r) => r.per_1000, (r) => r.delta),
    layout: {
      hovermode: "closest",
      xaxis: { type: "log", title: { text: "occurrences in 1,000 baseline tokens", standoff: 6 }, zeroline: false, nticks: 6 },
      yaxis: { title: { text: "Δ Pass@1", standoff: 6 }, zeroline: true, tickformat: ".3~f" },
    },
  }));
}

function agreement(one, other, names) {
  const there = new Map(other.map((r) => [r.c, r]));
  const own = one.filter((r) => there.has(r.c) && known(r.delta) && known(there.get(r.c).delta));
  return plot(300, `Δ on ${names[1]} against Δ on ${names[0]}`, () => ({
    click: true, traces: byKind(own, (r) => r.delta, (r) => there.get(r.c).delta),
    layout: {
      hovermode: "closest",
      xaxis: { title: { text: `Δ on ${safe(names[0])}`, standoff: 6 }, zeroline: true, tickformat: ".3~f" },
      yaxis: { title: { text: `Δ on ${safe(names[1])}`, standoff: 6 }, zeroline: true, tickformat: ".3~f" },
    },
  }));
}

function pHistogram(rows) {
  const bins = Array.from({ length: 20 }, (_, i) => 0.05 * (i + 0.5));
  const of = (group) => {
    const p = rows.filter((r) => r.group === group && known(r.p_value)).map((r) => r.p_value);
    return bins.map((_, i) => p.filter((x) => Math.min(Math.floor(x * 20), 19) === i).length / (p.length || 1));
  };
  const bars = (group, color) => ({
    type: "bar", x: bins, y: of(group), name: GROUPS[group], marker: { color },
    hovertemplate: `${GROUPS[group]}: %{y:.1%}<extra></extra>`,
  });
  const groups = ["candidate", "control"].filter((g) => rows.some((r) => r.group === g));
  const colors = { candidate: style("--strong_pillar"), control: style("--undetermined") };
  return plot(300, "Histogram of p-values", () => ({
    traces: groups.map((g) => bars(g, colors[g])),
    layout: {
      showlegend: groups.length > 1, legend: { orientation: "h", x: 0.5, y: 1, xanchor: "center", yanchor: "top" },
      xaxis: { title: { text: "p-value", standoff: 6 }, range: [0, 1], zeroline: false },
      yaxis: { title: { text: "share of the group", standoff: 6 }, tickformat: ".0%", zeroline: false },
    },
  }));
}

function racing(histories) {
  return plot(300, "Candidates still running in each round of seeds", () => ({
    traces: histories.flatMap((h) => Object.entries(h.active).map(([group, n], i) => ({
      type: "scatter", mode: "lines+markers", x: n.map((_, s) => s + 1), y: n,
      name: safe(`${h.benchmark}, ${GROUPS[group]}`), line: { shape: "hv", dash: i ? "dot" : "solid", width: 1.8 },
      hovertemplate: "round %{x}: %{y}<extra>%{fullData.name}</extra>",
    }))),
    layout: {
      showlegend: true, legend: { orientation: "h", y: -0.22 },
      colorway: ["--strong_pillar", "--strong_stumbling_block", "--equivalent", "--undetermined"].map(style),
      xaxis: { title: { text: "round (seed)", standoff: 6 }, dtick: 1, zeroline: false },
      yaxis: { title: { text: "candidates running", standoff: 6 }, rangemode: "tozero", zeroline: false },
    },
  }));
}

function whereForks(counts) {
  return plot(170, "Where in the baseline the forks begin", () => ({
    traces: [{
      type: "bar", x: counts.map((_, i) => i * 10 + 5), y: counts, marker: { color: style("--dim") },
      hovertemplate: "%{y} forks<extra></extra>",
    }],
    layout: {
      margin: { l: 44, r: 8, t: 6, b: 36 },
      xaxis: { title: { text: "% of the baseline", standoff: 4 }, range: [0, 100], zeroline: false },
      yaxis: { zeroline: false, title: { text: "forks", standoff: 4 } },
    },
  }));
}
