// Data, formats and small DOM helpers. Text from the run only ever enters the page as text nodes.

const byId = (id) => document.getElementById(id);
const settings = JSON.parse(byId("settings").textContent);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined));
  return node;
}

// ---- data: chunks inside the file, or the server's answers ----

const texts = new Map(); // token id -> [text, kind]
const learn = (vocab) => {
  for (const [id, entry] of Object.entries(vocab || {})) texts.set(Number(id), entry);
};

async function unpack(name) {
  const node = byId(`d-${name}`);
  if (!node) return null;
  const bytes = Uint8Array.from(atob(node.textContent.trim()), (c) => c.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(plain).text());
}

async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Knockout": settings.key },
    body: JSON.stringify(body),
  };
  const answer = await fetch(path, options);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error || `the server answered ${answer.status}`);
  learn(value.vocab);
  return value;
}

const source = settings.live ? {
  overview: () => ask("api/overview"),
  candidate: (c) => ask(`api/candidate/${c}`),
  pair: (key) => ask(`api/pair/${key.join("/")}`),
} : {
  async overview() {
    learn(await unpack("vocab"));
    return unpack("overview");
  },
  candidate: (c) => unpack(`c${c}`),
  async pair(key) {
    const cell = await unpack(`b${key.slice(0, 3).join(".")}`);
    const of = key[3] < 0 ? null : await unpack(`c${key[3]}`);
    const found = of && of.pairs.find((pair) => pair.key.join() === key.join());
    if (!cell || (key[3] >= 0 && !found)) return null;
    return { key, ...cell, knockout: found || null, picks: found?.picks || null };
  },
};

// ---- the address: a path, and what is chosen on the page ----

function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").map(decodeURIComponent), chosen: Object.fromEntries(new URLSearchParams(query)) };
}

// Choices go into the address without a new entry in the history, so that a page can be shared and kept.
function choosing(changes) {
  const { parts, chosen } = address();
  const next = Object.entries({ ...chosen, ...changes }).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(next).toString();
  history.replaceState(history.state, "", `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`);
}

// What a person chose for good, as far as the browser lets a file keep it.
const keep = {
  get(key) { try { return localStorage.getItem(`knockout.${key}`); } catch { return null; } },
  set(key, value) { try { localStorage.setItem(`knockout.${key}`, value); } catch { /* a private window */ } },
};

// ---- words and numbers ----

const VERDICTS = {
  strong_pillar: { name: "strong pillar", short: "pillar", mark: "▼" },
  strong_stumbling_block: { name: "strong stumbling block", short: "stumbling block", mark: "▲" },
  equivalent: { name: "neutral: equivalent", short: "equivalent", mark: "=" },
  undetermined: { name: "neutral: undetermined", short: "undetermined", mark: "?" },
};
const GROUPS = { candidate: "candidates", control: "controls", canary: "A/A check" };

const MINUS = "−";
const known = (x) => x !== null && x !== undefined && !Number.isNaN(x);
const fixed = (x, n) => (known(x) ? x.toFixed(n).replace("-", MINUS) : "–");
const signed = (x, n = 3) => {
  if (!known(x)) return "–";
  const text = fixed(x, n);
  return Number(x.toFixed(n)) > 0 ? `+${text}` : text.replace(/^−(0\.?0*)$/, "$1");
};
const percent = (x, n = 1) => (known(x) ? `${fixed(100 * x, n)} %` : "–");
const share = (part, whole) => (whole ? percent(part / whole) : "–");
const count = (n) => (known(n) ? Math.round(n).toLocaleString("en").replaceAll(",", "\u2009") : "–");
const pvalue = (p) => {
  if (!known(p)) return "–";
  return p >= 0.001 ? fixed(p, 3) : p.toExponential(1).replace("-", MINUS);
};
const big = (n) => {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (n >= size) return `${(n / (unit === "k" ? 1e3 : size)).toPrecision(3)} ${unit}`;
  }
  return count(n);
};
const duration = (s) => {
  if (s < 90) return `${fixed(s, 0)} s`;
  if (s < 5400) return `${fixed(s / 60, 0)} min`;
  return `${fixed(s / 3600, 1)} h`;
};
const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
const clip = (text, n) => (text.length > n ? `${text.slice(0, n - 1)}…` : text);

function quoted(id) {
  if (id < 0) return "(end)";
  const [text, kind] = texts.get(id) || [`#${id}`, 2];
  return kind === 0 ? `"${[...text].map(escaped).join("")}"` : `<${text}>`;
}

const NAMED = { "\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\" };
const UNSEEN = /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}|\p{Default_Ignorable_Code_Point}/u;
function escaped(character) {
  if (NAMED[character]) return NAMED[character];
  if (!UNSEEN.test(character)) return character;
  return `\\u{${character.codePointAt(0).toString(16)}}`;
}

// A longer text as it is, but with characters that cannot be seen, or reorder others, escaped.
const visible = (text) => [...text].map((c) => (/[\n\t]/.test(c) ? c : UNSEEN.test(c) ? escaped(c) : c)).join("");

const badge = (key) => el(
  "span", { class: `verdict ${key}` },
  el("span", { "aria-hidden": "true" }, VERDICTS[key].mark), ` ${VERDICTS[key].short}`,
);
const figure = (title, note, ...children) => el(
  "figure", {}, el("figcaption", {}, el("h3", {}, title), note ? el("p", { class: "dim" }, note) : null),
  ...children,
);
function choose(label, options, value, onchange) {
  const select = el("select", { id: `pick-${label}`, onchange: (event) => onchange(event.target.value) });
  for (const [key, text] of options) {
    select.append(el("option", { value: key, selected: String(key) === String(value) }, text));
  }
  return el("label", {}, el("span", {}, label), select);
}
function csv(rows) {
  const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const cell = (value) => {
    const text = !known(value) ? "" : Array.isArray(value) ? JSON.stringify(value) : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows.map((r) => columns.map((key) => r[key]))].map((line) => line.map(cell).join(",")).join("\n") + "\n";
}

function download(name, type, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name.replaceAll(/[^\w.-]+/g, "_") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const numeric = (...children) => el("td", { class: "n" }, ...children);
const toCandidate = (c, text) => el("a", { href: `#/candidate/${c}`, class: "token" }, text);
