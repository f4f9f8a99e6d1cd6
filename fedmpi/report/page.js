"use strict";
/* Draws the report: its data lie in #data, Vega-Lite draws the figures, tables are built and sorted here. */
/* Without what every object has, so that a number may be called "constructor" and is missing where it was not told. */
const bare = (_, value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? Object.assign(Object.create(null), value) : value);
const data = JSON.parse(document.getElementById("data").textContent, bare);
/* Vega looks titles up in objects that know some words already: these get a sign that is not seen. */
for (const [key, words] of Object.entries(data.metrics)) if (words in Object.prototype) data.metrics[key] = words + "\u200b";
const began = performance.now();
const root = document.documentElement;

/* ---- colours: Okabe and Ito's, told apart by all eyes; dashes where there are more than eight ---- */
const OKABE_ITO = {
  light: ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#B8A800"],
  dark: ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#F0E442", "#FFFFFF", "#4C9FD6"],
};
const DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]];
const configurations = data.configurations, hidden = new Set(), figures = [];
const labels = configurations.map((one) => one.label);
const dash = (i) => DASHES[Math.floor(i / 8) % DASHES.length];
const theme = () => root.dataset.theme || "light";
const colour = (i, mode = theme()) => OKABE_ITO[mode][i % 8];
const shownOnes = () => configurations.map((_, i) => i).filter((i) => !hidden.has(i));

/* ---- small tools ---- */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  const decimals = Number.isInteger(value) || size >= 10 ** digits ? 0 : Math.min(6, Math.max(0, digits - 1 - Math.floor(Math.log10(size))));
  return value.toLocaleString("en", { maximumFractionDigits: decimals, minimumFractionDigits: size < 1 ? decimals : 0 });
}
const spread = (pair) => (pair ? number(pair[0]) + (pair[1] !== null ? " ± " + number(pair[1], 2) : "") : "–");
function swatch(i) {
  const name = "http://www.w3.org/2000/svg", svg = document.createElementNS(name, "svg"), line = document.createElementNS(name, "line");
  for (const [key, value] of Object.entries({ width: 22, height: 10, class: "swatch", "aria-hidden": "true" })) svg.setAttribute(key, value);
  const look = { x1: 1, x2: 21, y1: 5, y2: 5, stroke: colour(i), "stroke-width": 3.5, "stroke-dasharray": dash(i)[1] ? dash(i).join(" ") : "none" };
  for (const [key, value] of Object.entries(look)) line.setAttribute(key, value);
  svg.append(line);
  svg.dataset.configuration = i;
  return svg;
}
function save(name, kind, text) {
  const address = URL.createObjectURL(new Blob([text], { type: kind }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
function csv(rows) {
  const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  return [columns, ...rows.map((row) => columns.map((column) => row[column]))].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

/* ---- tables that sort ---- */
/** columns: [{title, number}], rows: [[{text, sort, node, values} or text]]; values: {end of the column's title in the CSV: number} */
function table(name, columns, rows) {
  const body = make("tbody");
  const cells = rows.map((row) => row.map((cell) => (cell !== null && typeof cell === "object" ? cell : { text: cell })));
  const key = (cell) => (cell.sort !== undefined ? cell.sort : cell.text);
  let order = cells;
  const fill = () => body.replaceChildren(...order.map((row) => make("tr", {}, ...row.map((cell, i) =>
    make("td", { class: columns[i].number ? "number" : columns[i].text ? "text" : null }, ...(cell.node ? [cell.node()] : []), String(cell.text ?? "–"))))));
  const heads = columns.map((column, i) => make("th", { class: column.number ? "number" : null, scope: "col" },
    make("button", { type: "button", onclick: () => sortBy(i) }, column.title)));
  function sortBy(i) {
    const up = heads[i].getAttribute("aria-sort") === (columns[i].number ? "descending" : "ascending") ? !columns[i].number : columns[i].number;
    const direction = up ? -1 : 1;
    heads.forEach((head, other) => (other === i ? head.setAttribute("aria-sort", up ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    const missing = (value) => value === null || value === undefined || value === "–";
    order = [...cells].sort((a, b) => {
      const [x, y] = [key(a[i]), key(b[i])];
      if (missing(x) || missing(y)) return missing(x) - missing(y);
      return direction * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
    });
    fill();
  }
  fill();
  const plain = () => cells.map((row) => Object.fromEntries(row.flatMap((cell, i) => {
    if (cell.values) return Object.entries(cell.values).map(([end, value]) => [columns[i].title + end, value]);
    if (columns[i].number) return [[columns[i].title, typeof cell.sort === "number" ? cell.sort : typeof cell.text === "number" ? cell.text : null]];
    return [[columns[i].title, typeof cell.text === "string" ? cell.text.trim() : cell.text]];
  })));
  return { node: make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body)), csv: () => save(name + ".csv", "text/csv", csv(plain())) };
}
function card(title, name, made, note, wide = true) {
  return make("div", { class: "card" + (wide ? " wide" : ""), id: name },
    make("figcaption", {}, make("h3", {}, title), make("span", { class: "save" }, make("button", { type: "button", onclick: made.csv }, "CSV"))),
    note ? make("p", { class: "note" }, note) : null, made.node);
}
const named = (i) => ({ text: " " + labels[i], sort: labels[i], node: () => swatch(i) });
const pair = (values) => ({ text: spread(values), sort: values ? values[0] : null, values: { "": values ? values[0] : null, ...(severalSeeds ? { " (deviation)": values ? values[1] : null } : {}) } });

/* ---- figures ---- */
/** About how many pixels axis and legend take below a plot; of lines unless a figure says otherwise. */
const BELOW = { lines: 56, legend: 86, cells: 107, bars: 104 };
function look(mode) {
  const ink = mode === "dark" ? "#e8ecf1" : "#17202a", soft = mode === "dark" ? "#9aa7b5" : "#5a6672", line = mode === "dark" ? "#313a45" : "#e4e8ed";
  const font = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif";
  return {
    background: "transparent", font, view: { stroke: null },
    axis: { labelColor: soft, titleColor: soft, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 11, titleFontSize: 12, titleFontWeight: 500, labelLimit: 180 },
    legend: { labelColor: ink, titleColor: soft, labelFontSize: 11, titleFontSize: 11, titleFontWeight: 500, labelLimit: 300, orient: "bottom" },
    title: { color: ink, fontSize: 14, anchor: "start" },
    line: { strokeWidth: 2, strokeJoin: "round" },
  };
}
class Figure {
  /** what: {name, title, note, controls(), rows(state), spec(state, rows, mode, alone), height(state, rows), below, wide} */
  constructor(what) {
    Object.assign(this, what);
    this.state = {};
    this.drawn = false;
    const controls = Object.entries(what.controls ? what.controls() : {}).map(([key, { label, options, value }]) => {
      this.state[key] = value ?? options[0][0];
      if (options.length < 2) return null;
      const groups = Map.groupBy ? Map.groupBy(options, (option) => option[2] || "") : new Map([["", options]]);
      const listed = [...groups].flatMap(([group, inside]) => {
        const made = inside.map(([id, text]) => make("option", { value: id, selected: id === this.state[key] }, text));
        return group ? [make("optgroup", { label: group }, ...made)] : made;
      });
      return make("label", {}, label, make("select", { name: key, onchange: (event) => { this.state[key] = event.target.value; this.draw(); } }, ...listed));
    }).filter(Boolean);
    this.place = make("div", { class: "chart" });
    this.node = make("figure", { id: this.name, class: this.wide ? "wide" : null },
      make("figcaption", {}, make("h3", {}, this.title), make("span", { class: "save" },
        make("button", { type: "button", onclick: () => this.svg() }, "SVG"),
        make("button", { type: "button", onclick: () => save(this.name + ".csv", "text/csv", csv(this.rows(this.state))) }, "CSV"))),
      this.note ? make("p", { class: "note" }, this.note) : null,
      controls.length ? make("div", { class: "controls" }, ...controls) : null, this.place);
    figures.push(this);
  }
  plotHeight(rows) { return this.height ? this.height(this.state, rows) : 290; }
  /** Takes the room of the figure that is not drawn yet: what lies below it stays where it is. */
  reserve() { this.place.style.minHeight = this.plotHeight(this.height ? this.rows(this.state) : []) + (this.below ?? BELOW.lines) + "px"; }
  specification(rows, mode, alone) {
    return { $schema: "https://vega.github.io/schema/vega-lite/v6.json", config: look(mode), data: { values: rows }, autosize: { type: "fit-x", contains: "padding" },
      height: this.plotHeight(rows), ...this.spec(this.state, rows, mode, alone) };
  }
  async draw() {
    this.drawn = true;
    const rows = this.rows(this.state), mode = theme();
    if (!rows.length) { this.place.style.minHeight = ""; this.view?.finalize(); this.view = null; this.place.replaceChildren(make("p", { class: "note" }, "Nothing to draw here.")); return; }
    const result = await vegaEmbed(this.place, { width: "container", ...this.specification(rows, mode, false) },
      { actions: false, renderer: "canvas", tooltip: { theme: mode }, mode: "vega-lite", ast: false });
    this.place.style.minHeight = "";
    this.view?.finalize();
    this.view = result.view;
    this.node.dataset.drawn = "yes";
    root.dataset.drawn = String(document.querySelectorAll("[data-drawn=yes]").length);
    root.dataset.milliseconds ??= String(Math.round(performance.now()));
  }
  async svg() {
    const spec = { width: 720, ...this.specification(this.rows(this.state), "light", true), background: "white", padding: 12, title: this.title };
    const { view } = await vegaEmbed(make("div"), spec, { actions: false, renderer: "none", mode: "vega-lite" });
    save(this.name + ".svg", "image/svg+xml", await view.toSVG());
    view.finalize();
  }
}
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    const figure = figures.find((one) => one.node === target);
    if (isIntersecting && figure && !figure.drawn) figure.draw();
  }
}, { rootMargin: "300px" });
const again = () => figures.forEach((figure) => figure.drawn && figure.draw());

/** Colour and dash of the configurations, their legend only where a figure stands alone. */
function byConfiguration(mode, alone) {
  const some = shownOnes(), domain = some.map((i) => labels[i]);
  const legend = alone ? { title: null, columns: 3, symbolType: "stroke", symbolSize: 300 } : null;
  return {
    color: { field: "configuration", type: "nominal", scale: { domain, range: some.map((i) => colour(i, mode)) }, legend },
    strokeDash: { field: "configuration", type: "nominal", scale: { domain, range: some.map(dash) }, legend },
  };
}
/** An axis of whole numbers: a tick at each of a few, and between many at whole ones only. */
function whole(numbers) {
  const some = [...new Set(numbers)].sort((a, b) => a - b);
  return some.length <= 12 ? { values: some } : { tickMinStep: 1 };
}
/** Room around values that are all the same, which has none of its own. */
function around(rows, log, zero) {
  const values = rows.flatMap((row) => [row.y, row.low, row.high]).filter((value) => value !== null && value !== undefined);
  const [least, most] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  if (least !== most || (zero && least !== 0)) return {};
  return { domain: log ? [least / 2, least * 2] : [least - (Math.abs(least) / 2 || 1), least + (Math.abs(least) / 2 || 1)] };
}
/** Lines with bands, points where there is one value only; rows: {configuration, x, y, low, high, …}. */
function lines(rows, mode, alone, { x, y, log = false, zero = false, rule = null, tooltip = [], step = false, counted = false }) {
  const encoding = byConfiguration(mode, alone), scale = { ...(log ? { type: "log" } : { zero }), ...(rule === null ? around(rows, log, zero) : {}) };
  const ticks = counted ? { tickCount: 6, ...whole(rows.map((row) => row.x)) } : { tickCount: 6 };
  const xs = { field: "x", type: "quantitative", title: x, scale: { nice: false, zero: false }, axis: { grid: false, ...ticks } };
  const ys = { field: "y", type: "quantitative", title: y, scale, axis: { tickCount: 6 } };
  const layer = [];
  if (rows.some((row) => row.low !== undefined && row.low !== null)) {
    layer.push({ transform: [{ filter: "isValid(datum.low)" }], mark: { type: "area", opacity: 0.17 },
      encoding: { x: xs, y: { ...ys, field: "low" }, y2: { field: "high" }, color: encoding.color, detail: { field: "configuration" } } });
  }
  if (rule !== null) layer.push({ data: { values: [{}] }, mark: { type: "rule", strokeDash: [4, 4], color: "#888" }, encoding: { y: { datum: rule } } });
  layer.push({ mark: { type: "line", ...(step ? { interpolate: "step-after" } : {}) }, encoding: { x: xs, y: ys, ...encoding } });
  const count = new Map();
  rows.forEach((row) => count.set(row.configuration, (count.get(row.configuration) ?? 0) + 1));
  const single = rows.filter((row) => count.get(row.configuration) === 1);
  if (single.length) layer.push({ data: { values: single }, mark: { type: "point", filled: true, size: 60, opacity: 1 }, encoding: { x: xs, y: ys, color: encoding.color } });
  layer.push({ params: [{ name: "near", select: { type: "point", on: "pointermove", nearest: true, clear: "pointerout" } }],
    mark: { type: "point", filled: true, size: 70 },
    encoding: { x: xs, y: ys, color: encoding.color, opacity: { condition: { param: "near", empty: false, value: 1 }, value: 0 },
      tooltip: [{ field: "configuration", title: "configuration" }, { field: "x", title: x, format: ".5~g" }, { field: "y", title: y, format: ".5~g" }, ...tooltip] } });
  return { layer };
}
/** Rows of one number of all configurations shown. */
function curve(key, axis, log = false) {
  return shownOnes().flatMap((i) => {
    const { x, y } = configurations[i], values = y[key];
    if (!values || !x[axis]) return [];
    return x[axis].flatMap((at, t) => {
      const mean = values.mean[t], deviation = values.deviation?.[t];
      if (mean === null || (log && mean <= 0)) return [];
      const band = deviation !== undefined && deviation !== null && (!log || mean - deviation > 0) ? { low: mean - deviation, high: mean + deviation } : {};
      return [{ configuration: labels[i], round: x.round[t], x: at, y: mean, ...band, ...(values.n ? { seeds: values.n[t] } : {}) }];
    });
  });
}
const axisOptions = () => Object.entries(data.axes);
const told = (keys) => keys.filter((key) => key in data.metrics);
const logScale = { label: "scale", options: [["linear", "linear"], ["log", "logarithmic"]] };
const severalSeeds = configurations.some((one) => one.seeds.length > 1);
const SEEDS = severalSeeds ? [{ field: "low", title: "mean − deviation", format: ".5~g" }, { field: "high", title: "mean + deviation", format: ".5~g" }, { field: "seeds", title: "seeds" }] : [];

const GROUPS = [
  ["scores", /^(test_|val_)/], ["each client's own scores", /^client_(accuracy|loss|tuned)_/], ["training", /^(train_loss|lr|steps|samples|update_norm|gradient_diversity|client_drift|gamma|weight_divergence|clipped|diverged)/],
  ["who takes part", /^(participants|asked|available|strata|client|inclusion|sample_use|samples_used|attackers)/],
  ["privacy and sizes", /epsilon|^size_|sampling_probability|clipped_fraction/], ["mediators", /^(kl_|mediators|visits|hops)/],
  ["cost", /seconds|bytes|balance/],
];
function grouped(keys) {
  const group = (key) => (GROUPS.find(([, pattern]) => pattern.test(key)) || ["other"])[0];
  const order = [...GROUPS.map(([name]) => name), "other"];
  return keys.map((key) => [key, data.metrics[key], group(key)]).sort((a, b) => order.indexOf(a[2]) - order.indexOf(b[2]));
}
/** Whether a number's means are positive and lie more than a factor of 100 apart. */
function wideRange(key) {
  const means = configurations.flatMap((one) => (one.y[key]?.mean ?? []).filter((value) => value !== null));
  return means.length > 0 && Math.min(...means) > 0 && Math.max(...means) > 100 * Math.min(...means);
}
const varies = (key) => configurations.some((one) => new Set(one.y[key]?.mean ?? []).size > 1);
function lineFigure(name, title, keys, note, further = {}) {
  if (!keys.length) return null;
  return new Figure({ name, title, note, ...further,
    controls: () => ({
      key: { label: "show", options: further.groups ? grouped(keys) : keys.map((key) => [key, data.metrics[key]]), value: keys[0] },
      axis: { label: "against", options: axisOptions() }, ...(further.rule === undefined ? { scale: { ...logScale, value: further.wideRange && wideRange(keys[0]) ? "log" : "linear" } } : {}) }),
    rows: (state) => curve(state.key, state.axis, state.scale === "log"),
    spec: (state, rows, mode, alone) => lines(rows, mode, alone, { x: data.axes[state.axis], counted: state.axis === "round", y: data.metrics[state.key], log: state.scale === "log", rule: further.rule ?? null, tooltip: SEEDS }) });
}

/* ---- figures of single runs ---- */
const runName = (run) => labels[run.configuration] + ", seed " + run.seed + (data.runs.filter((other) => other.configuration === run.configuration && other.seed === run.seed).length > 1 ? " (" + run.name + ")" : "");
function runOptions(part) {
  const some = data.runs.map((run, i) => [String(i), runName(run)]).filter(([i]) => data.runs[i][part]);
  return { run: { label: "run", options: some } };
}
const cellLayer = (rows, x, y, colourTitle, format, tooltip, domain) => ({ mark: { type: "rect", tooltip: true },
  encoding: {
    x: { field: "left", type: "quantitative", title: x, scale: { nice: false, zero: false }, axis: { grid: false, ...whole(rows.map((row) => row.left + 0.5)) } }, x2: { field: "right" },
    y: { field: "top", type: "quantitative", title: y, scale: { nice: false, zero: false, reverse: true }, axis: { grid: false, ...whole(rows.map((row) => row.top + 0.5)) } }, y2: { field: "bottom" },
    color: { field: "value", type: "quantitative", title: colourTitle, scale: { scheme: "viridis", ...(domain ? { domain } : {}) }, legend: { format, gradientLength: 180, titleLimit: 400, gradientThickness: 10, direction: "horizontal" } }, tooltip } });
function participationRows(state) {
  const part = data.runs[state.run].participation, rows = [];
  part.counts.forEach((line, r) => line.forEach((count, c) => {
    const [low, high, from, to] = [part.clients[r], part.clients[r + 1], part.rounds[c], part.rounds[c + 1]];
    const pairs = (high - low) * (to - from);
    rows.push({ low, high, from, to, count, left: from - 0.5, right: to - 0.5, top: low - 0.5, bottom: high - 0.5, value: Math.min(1, count / pairs) });
  }));
  return rows;
}
function useRows() {
  return shownOnes().flatMap((i) => {
    const own = data.runs.filter((run) => run.configuration === i && run.participation?.evenness);
    return own.slice(0, 1).flatMap((run) => {
      const { uses } = run.participation, all = uses.reduce((sum, [, , clients]) => sum + clients, 0);
      let so_far = 0;
      return uses.map(([, times, clients]) => ({ configuration: labels[i], run: run.name, x: times, y: (so_far += clients) / all }));
    });
  });
}
const VIEW_SCORES = [["accuracy", "accuracy"], ["tuned_accuracy", "accuracy, fine-tuned"], ["loss", "loss"], ["tuned_loss", "loss, fine-tuned"]];
const VIEW_AGAINST = [["training_samples", "training samples"], ["times_used", "rounds taken part in"], ["label_distance", "distance of the label mix from that of all"]];
const viewed = () => data.runs.filter((run) => run.view);
const ofView = (names) => names.filter(([name]) => viewed().some((run) => run.view[name]));
const wordsOf = (names, key) => names.find(([name]) => name === key)[1];
function distributionRows(state) {
  return shownOnes().flatMap((i) => viewed().filter((run) => run.configuration === i && run.view[state.score]).slice(0, 1).flatMap((run) => {
    const values = run.view[state.score].filter((value) => value !== null).sort((a, b) => a - b);
    return values.map((value, place) => ({ configuration: labels[i], run: run.name, round: run.view.round, x: value, y: (place + 1) / values.length }));
  }));
}
function viewRows(state) {
  const { view } = data.runs[state.run], far = view[state.against], scores = view[state.score];
  return far && scores ? view.client.map((client, i) => ({ client, x: far[i], y: scores[i], samples: view.samples[i], times_used: view.times_used[i] })).filter(({ x, y }) => x !== null && y !== null) : [];
}
function viewTable() {
  const columns = VIEW_SCORES.filter(([name]) => name.endsWith("accuracy") || !told(["client_accuracy_mean"]).length).flatMap(([name]) => ["mean", "worst10", "best10", "std", "jain"].map((part) => "client_" + name + "_" + part)).filter((key) => configurations.some((one) => one.final[key]));
  if (!columns.length) return null;
  return card("How clients are served in the end", "served", table("served", [{ title: "configuration" }, ...columns.map((key) => ({ title: data.metrics[key], number: true }))], configurations.map((one, i) => [named(i), ...columns.map((key) => pair(one.final[key]))])),
    "Every client counts once" + (severalSeeds ? "; mean ± standard deviation over seeds" : "") + ". Worst and best 10 %: mean of that tenth of the clients. Jain's index: (Σa)²/(N Σa²), 1 where all are served alike.");
}
function strataRows(state) {
  const cells = data.runs[state.run].strata, rounds = [...new Set(cells.map((cell) => cell[0]))];
  const next = new Map(rounds.map((round, i) => [round, rounds[i + 1] ?? round + 1]));
  return cells.map(([round, stratum, size, drawn]) => ({ round, left: round - 0.5, right: next.get(round) - 0.5, top: stratum - 0.5, bottom: stratum + 0.5, stratum, clients: size, drawn,
    value: state.what === "clients" ? size : state.what === "drawn" ? drawn : size ? drawn / size : 0 }));
}
function mediatorRows(state) {
  return data.runs[state.run].mediators.flatMap((one) => ["mediators", "participants"].filter((of) => one[of].length === 5).map((of) => {
    const [least, lower, median, upper, most] = one[of];
    return { round: one.round, of, least, lower, median, upper, most };
  }));
}
function stacked(rows, mode, x, title, field, order) {
  const palette = OKABE_ITO[mode];
  return { mark: { type: "bar", tooltip: true, cornerRadius: 1 }, encoding: {
    y: { field: "configuration", type: "nominal", title: null, sort: null, axis: { labelLimit: 150 } },
    x: { field: "value", type: "quantitative", title: x, stack: true, axis: { tickCount: 5 } },
    color: { field, type: "nominal", title, sort: order, scale: { domain: order, range: order.map((_, i) => palette[i % 8]) }, legend: { columns: 3 } },
    order: { field: "order", type: "quantitative" } } };
}
const barHeight = (_, rows) => Math.max(60, 26 * new Set(rows.map((row) => row.configuration)).size);
const LINK_NAMES = { client_up: "from clients", client_down: "to clients", mediator_up: "from mediators", mediator_down: "to mediators" };
function traffic() {
  return shownOnes().flatMap((i) => Object.entries(configurations[i].traffic.links).map(([link, value]) => ({ configuration: labels[i], link: LINK_NAMES[link], value, order: Object.keys(LINK_NAMES).indexOf(link) })));
}
const phaseNames = [...new Set(configurations.flatMap((one) => Object.keys(one.phases)))];
function phases() {
  return shownOnes().flatMap((i) => Object.entries(configurations[i].phases).map(([phase, value]) => ({ configuration: labels[i], phase, value: value * 1000, order: phaseNames.indexOf(phase) })));
}
function rankRows(state) {
  return data.runs[state.run].ranks.flatMap(({ rank, busy, waiting }) => [{ rank, what: "busy", value: busy * 1000, order: 0 }, { rank, what: "waiting for the slowest", value: waiting * 1000, order: 1 }]);
}
function targetRows(state) {
  return shownOnes().flatMap((i) => {
    const cost = data.targets.costs[i][state.axis];
    if (!cost) return [];
    return data.targets.levels.flatMap((level, t) => cost.mean[t] === null ? [] : [{ configuration: labels[i], x: level, y: cost.mean[t], reached: cost.n[t] + " of " + configurations[i].seeds.length,
      ...(cost.deviation[t] !== null ? { low: Math.max(0, cost.mean[t] - cost.deviation[t]), high: cost.mean[t] + cost.deviation[t] } : {}) }]);
  });
}

/* ---- the sections ---- */
const main = document.getElementById("main");
function section(id, title, ...parts) {
  const inside = parts.flat().filter(Boolean);
  if (!inside.length) return;
  main.append(make("section", { "aria-labelledby": "h-" + id, id: "s-" + id }, make("h2", { id: "h-" + id }, title), make("div", { class: "grid" }, ...inside.map((one) => one.node && one instanceof Figure ? one.node : one))));
  document.getElementById("contents").append(make("a", { href: "#s-" + id }, title));
}
function results() {
  const scores = Object.keys(data.metrics).filter((key) => /^(test|val)_/.test(key) && configurations.some((one) => one.final[key]));
  const best = ["test_accuracy", "val_accuracy"].filter((key) => configurations.some((one) => one.best[key]));
  const costs = Object.keys(data.axes).filter((axis) => axis !== "round");
  const titles = { samples: "samples", megabytes: "MB", seconds: "seconds", virtual_seconds: "virtual s" };
  const columns = [{ title: "configuration" },
    ...scores.map((key) => ({ title: data.metrics[key], number: true })), ...best.map((key) => ({ title: "best " + data.metrics[key], number: true })), ...costs.map((axis) => ({ title: titles[axis], number: true })), { title: "seeds", number: true }, { title: "rounds", number: true }];
  const rows = configurations.map((one, i) => [named(i), ...scores.map((key) => pair(one.final[key])), ...best.map((key) => pair(one.best[key])), ...costs.map((axis) => pair(one.spent[axis])), one.seeds.length, one.rounds]);
  return card("Scores and costs", "results", table("results", columns, rows), "The last score of every run" + (severalSeeds ? ", mean ± standard deviation over seeds" : "") + "; samples, traffic and time of the whole run.");
}
function differences() {
  const columns = [{ title: "key" }, ...labels.map((label) => ({ title: label }))];
  if (!data.differences.length) return make("div", { class: "card wide", id: "differences" }, make("p", { class: "note" }, "One configuration: the runs differ in their seeds only."), common());
  const made = card("Settings of the configurations", "differences", table("differences", columns, data.differences));
  made.querySelector(".scroll").classList.add("tall");
  made.append(common());
  return made;
}
function common() {
  return make("details", {}, make("summary", {}, data.common.length + " settings that all runs share"), table("settings", [{ title: "key" }, { title: "value", text: true }], data.common).node);
}
function targetTable() {
  const place = make("div"), { levels, costs, key, rises } = data.targets;
  const axes = Object.keys(data.axes), titles = { round: "rounds", samples: "samples", megabytes: "MB", seconds: "seconds", virtual_seconds: "virtual s" };
  let made;
  const fill = (level) => {
    const t = levels.indexOf(level);
    const rows = configurations.map((one, i) => {
      const reached = costs[i].round ? costs[i].round.n[t] : 0;
      return [named(i), { text: reached + " of " + one.seeds.length, sort: reached / one.seeds.length, values: { "": reached, " (of)": one.seeds.length } }, ...axes.map((axis) => pair(costs[i][axis] && costs[i][axis].mean[t] !== null ? [costs[i][axis].mean[t], costs[i][axis].deviation[t]] : null))];
    });
    made = table("to-target", [{ title: "configuration" }, { title: "runs that reached it", number: true }, ...axes.map((axis) => ({ title: titles[axis], number: true }))], rows);
    place.replaceChildren(made.node);
  };
  const choice = make("select", { name: "target", onchange: (event) => fill(Number(event.target.value)) }, ...levels.map((level) => make("option", { value: level, selected: level === data.targets.default }, number(level))));
  fill(data.targets.default);
  return make("div", { class: "card wide", id: "to-target" },
    make("figcaption", {}, make("h3", {}, (rises ? "Spent up to a " : "Spent down to a ") + data.metrics[key]), make("label", { class: "note" }, "of ", choice), make("span", { class: "save" }, make("button", { type: "button", onclick: () => made.csv() }, "CSV"))),
    make("p", { class: "note" }, "At the end of the first round whose evaluation reached it, over the runs that did."), place);
}
function evennessTable() {
  const some = data.runs.filter((run) => run.participation?.evenness);
  if (!some.length) return null;
  const columns = [{ title: "run" }, { title: "used at all", number: true }, { title: "effective share", number: true }, { title: "Gini", number: true }, { title: "most often", number: true }];
  return card("How evenly clients were used", "evenness", table("evenness", columns, some.map((run) => {
    const e = run.participation.evenness;
    return [{ text: " " + runName(run), sort: runName(run), node: () => swatch(run.configuration) }, e.used, e.effective, e.gini, e.largest].map((v) => (typeof v === "number" ? { text: number(v), sort: v } : v));
  })), "Effective share: (Σu)²/(N Σu²) of the times u that each of N clients took part; 1 and a Gini coefficient of 0: all equally often.");
}
function runsTable() {
  const columns = ["run", "configuration"].map((title) => ({ title })).concat(["seed", "rounds"].map((title) => ({ title, number: true })), { title: "ended" }, ["ranks", "clients", "parameters"].map((title) => ({ title, number: true })), { title: "engine", text: true }, { title: "versions" });
  const rows = data.runs.map((run) => [run.name, named(run.configuration), run.seed, run.rounds, run.ending, ...[run.ranks_count, run.clients_count, run.parameters].map((value) => ({ text: number(value), sort: value })), run.engine || "–", run.versions || "–"]);
  return card("Runs", "runs", table("runs", columns, rows));
}
const anyRun = (part) => data.runs.some((run) => run[part]);
const several = data.runs.length > 1 ? "The run is chosen above the figure." : null;

function build() {
  const seeds = data.runs.length;
  document.getElementById("about").textContent = seeds + (seeds === 1 ? " run, " : " runs, ") + labels.length + (labels.length === 1 ? " configuration, " : " configurations, ") + number(Math.max(...configurations.map((one) => one.rounds))) + " rounds" + (severalSeeds ? "; bands are mean ± standard deviation over seeds" : "");
  document.getElementById("foot").textContent = "Written by fedmpi " + data.version + ". Figures drawn by Vega-Lite. The page needs no network: all it shows is in this file.";
  document.getElementById("legend").replaceChildren(...labels.map((label, i) => make("button", { type: "button", class: "chip", "aria-pressed": "true", title: "show or hide in all figures", onclick: (event) => {
    const chip = event.currentTarget;
    hidden.has(i) ? hidden.delete(i) : hidden.add(i);
    chip.setAttribute("aria-pressed", String(!hidden.has(i)));
    again();
  } }, swatch(i), label)));

  section("results", "Results", results(), data.notes.map((note) => make("div", { class: "card wide" }, make("p", { class: "note" }, "Mind: " + note + "."))));
  const scores = told(["test_accuracy", "val_accuracy", "test_macro_f1", "val_macro_f1", "test_loss", "val_loss", "train_loss"]), keys = [...scores, ...Object.keys(data.metrics).filter((key) => !scores.includes(key))];
  section("curves", "Curves", lineFigure("curve", "Over the run", keys, null, { groups: true, wide: true, height: () => 380 }),
    lineFigure("loss", "Losses", told(["test_loss", "val_loss", "train_loss"]), null, { wideRange: true }), told(["train_loss"]).length ? lineFigure("training", "Training", told(["samples", "steps", "participants", "lr"])) : null);
  section("differences", "What differs", differences());
  if (data.targets.levels) {
    const what = data.targets.rises ? "an accuracy" : "a loss";
    section("target", (data.targets.rises ? "Up to " : "Down to ") + what, targetTable(), new Figure({ name: "target", title: "Cost of " + what, wide: true, note: "What had been spent when " + what + " was first reached; over the runs that reached it.",
      controls: () => ({ axis: { label: "cost in", options: axisOptions() }, scale: logScale }),
      rows: (state) => (state.scale === "log" ? targetRows(state).filter((row) => row.y > 0).map((row) => (row.low > 0 ? row : { ...row, low: null })) : targetRows(state)),
      spec: (state, rows, mode, alone) => lines(rows, mode, alone, { x: data.metrics[data.targets.key], y: data.axes[state.axis], zero: true, log: state.scale === "log", tooltip: [{ field: "reached", title: "runs that reached it" }] }) }));
  }
  section("clients", "Who took part", anyRun("participation") ? [
    new Figure({ name: "participation", title: "Clients and rounds", note: several, wide: true, controls: () => runOptions("participation"), rows: participationRows, height: () => 300, below: BELOW.cells,
      spec: (state, rows) => cellLayer(rows, "round", "client", "share of the clients of a cell that took part", ".2~f", [{ field: "low", title: "clients from" }, { field: "high", title: "below" }, { field: "from", title: "rounds from" }, { field: "to", title: "below" }, { field: "count", title: "times" }, { field: "value", title: "share", format: ".3~f" }], [0, 1]) }),
    new Figure({ name: "uses", title: "Clients that took part at most so often", note: severalSeeds ? "The first seed of each configuration." : null, rows: useRows,
      spec: (state, rows, mode, alone) => lines(rows, mode, alone, { x: "times", counted: true, y: "share of the clients", zero: true, step: true }) }),
    told(["client_use_gini"]).length ? lineFigure("use", "Evenness over the rounds", told(["client_use_gini", "client_use_effective", "clients_used", "sample_use_gini", "sample_use_effective", "samples_used"])) : null, evennessTable(),
  ] : [told(["client_use_gini"]).length ? lineFigure("use", "Evenness over the rounds", told(["client_use_gini", "client_use_effective", "clients_used"])) : null,
    make("div", { class: "card wide" }, make("p", { class: "note" }, "Who took part was not recorded: run with --set logging.participants=true."))]);
  section("view", "Every client", viewed().length ? [viewTable(),
    new Figure({ name: "view-distribution", title: "Clients up to a score", note: severalSeeds ? "After the last evaluation, the first seed of each configuration." : "After the last evaluation.", controls: () => ({ score: { label: "show", options: ofView(VIEW_SCORES) } }), rows: distributionRows,
      spec: (state, rows, mode, alone) => lines(rows, mode, alone, { x: wordsOf(VIEW_SCORES, state.score) + " of a client", y: "share of the clients", zero: true, step: true }) }),
    new Figure({ name: "view-against", title: "Scores of single clients", note: several, wide: true, controls: () => ({ ...runOptions("view"), score: { label: "show", options: ofView(VIEW_SCORES) }, against: { label: "against", options: ofView(VIEW_AGAINST) } }), rows: viewRows,
      spec: (state, rows, mode) => ({ mark: { type: "point", filled: true, size: 40, opacity: 0.55, color: colour(data.runs[state.run].configuration, mode), tooltip: true }, encoding: {
        x: { field: "x", type: "quantitative", title: wordsOf(VIEW_AGAINST, state.against), scale: state.against === "training_samples" && rows.every((row) => row.x > 0) ? { type: "log" } : { zero: false }, axis: { grid: false, tickCount: 6 } },
        y: { field: "y", type: "quantitative", title: wordsOf(VIEW_SCORES, state.score), scale: { zero: false } },
        tooltip: [{ field: "client" }, { field: "y", title: wordsOf(VIEW_SCORES, state.score), format: ".5~g" }, { field: "x", title: wordsOf(VIEW_AGAINST, state.against), format: ".5~g" }, { field: "samples", title: "samples evaluated" }, { field: "times_used", title: "rounds taken part in" }] } }) }),
    lineFigure("view-rounds", "Over the rounds", told(VIEW_SCORES.flatMap(([name]) => ["worst10", "mean", "best10", "std", "jain", "weighted"].map((part) => "client_" + name + "_" + part))), null, { wide: true })] : []);
  section("strata", "Strata", anyRun("strata") ? [new Figure({ name: "strata", title: "Strata over the rounds", note: "Numbers of strata mean nothing from one clustering to the next.", wide: true,
    controls: () => ({ ...runOptions("strata"), what: { label: "show", options: [["clients", "clients of the stratum"], ["drawn", "clients drawn"], ["share", "share drawn"]] } }), rows: strataRows,
    height: (_, rows) => Math.min(360, 60 + 22 * new Set(rows.map((row) => row.stratum)).size), below: BELOW.cells,
    spec: (state, rows) => cellLayer(rows, "round", "stratum", { clients: "clients", drawn: "clients drawn", share: "share drawn" }[state.what], state.what === "share" ? ".2~f" : "d", [{ field: "round" }, { field: "stratum" }, { field: "clients" }, { field: "drawn" }]) }),
    varies("strata") ? lineFigure("strata-count", "Number of strata", ["strata"]) : null] : []);
  section("sizes", "Size estimates", told(["size_ratio"]).length ? [lineFigure("size-ratio", "Estimated size / true size", ["size_ratio"], "1 is the truth.", { rule: 1 }), lineFigure("sizes", "Estimate, truth and what follows", told(["size_estimate", "size_true", "sampling_probability", "clipped_fraction", "size_asked"]))] : []);
  section("mediators", "Mediators", anyRun("mediators") ? [new Figure({ name: "mediators", title: "How far label mixes are from the target", note: "Kullback–Leibler divergence over mediators and over participants: median, middle half, and all of them.", wide: true, controls: () => runOptions("mediators"), rows: mediatorRows, below: BELOW.legend,
    spec: (state, rows, mode) => {
      const of = { field: "of", type: "nominal", title: null, scale: { domain: ["mediators", "participants"], range: [colour(0, mode), colour(1, mode)] } }, x = { field: "round", type: "quantitative", title: "round", scale: { nice: false, zero: false }, axis: { grid: false, ...whole(rows.map((row) => row.round)) } };
      const band = (low, high, opacity) => ({ mark: { type: "area", opacity }, encoding: { x, y: { field: low, type: "quantitative", title: "KL divergence" }, y2: { field: high }, color: of } });
      return { layer: [band("least", "most", 0.12), band("lower", "upper", 0.25), { mark: { type: "line", point: rows.length < 30 }, encoding: { x, y: { field: "median", type: "quantitative" }, color: of, tooltip: ["of", "round", "least", "lower", "median", "upper", "most"].map((field) => ({ field })) } }] };
    } })] : []);
  section("cost", "Traffic and time", [
    new Figure({ name: "traffic", title: "Traffic per link", note: "Of the simulated system, whole runs.", rows: traffic, height: barHeight, below: BELOW.bars, spec: (state, rows, mode) => stacked(rows, mode, "megabytes", null, "link", Object.values(LINK_NAMES).filter((name) => rows.some((row) => row.link === name))) }),
    phaseNames.length ? new Figure({ name: "phases", title: "Phases of a round", note: "Mean of all rounds; evaluation runs beside the next round's training where there are several ranks.", rows: phases, height: barHeight, below: BELOW.bars, spec: (state, rows, mode) => stacked(rows, mode, "milliseconds", null, "phase", phaseNames) }) : null,
    anyRun("ranks") ? new Figure({ name: "ranks", title: "Balance of the ranks", note: "Milliseconds of a round in which a rank trains, and waits for the slowest.", controls: () => runOptions("ranks"), rows: rankRows, height: (_, rows) => Math.min(420, Math.max(60, 11 * rows.length)), below: BELOW.bars,
      spec: (state, rows, mode) => ({ mark: { type: "bar", tooltip: true }, encoding: { y: { field: "rank", type: "ordinal", title: "rank", axis: { labelOverlap: true } }, x: { field: "value", type: "quantitative", title: "milliseconds", axis: { tickCount: 5 } }, color: { field: "what", type: "nominal", title: null, scale: { domain: ["busy", "waiting for the slowest"], range: [colour(0, mode), mode === "dark" ? "#3d4752" : "#d5dbe2"] } }, order: { field: "order", type: "quantitative" } } }) }) : null,
    lineFigure("time", "Time and bytes of a round", told(["seconds", "virtual_seconds", "rank_balance", "bytes_client_up", "bytes_client_down", "bytes_mediator_up", "bytes_mediator_down"])),
  ]);
  const privacy = told(["update_epsilon", "size_epsilon_max", "size_epsilon_mean"]);
  section("privacy", "Privacy spent", privacy.length ? [lineFigure("privacy", "ε spent so far", privacy, "Of the updates at the run's δ, of the size answers without one.", { wide: true })] : []);
  section("warnings", "Warnings and runs", [data.warnings.length ? card("Warnings", "warnings", table("warnings", [{ title: "times", number: true }, { title: "warning", text: true }, { title: "runs", text: true }],
    data.warnings.map((one) => [one.times, one.text, one.runs.slice(0, 4).join(", ") + (one.runs.length > 4 ? " and " + (one.runs.length - 4) + " more" : "")]))) : make("div", { class: "card wide", id: "warnings" }, make("p", { class: "note" }, "No run warned of anything.")), runsTable()]);
  figures.forEach((figure) => figure.reserve());
  figures.forEach((figure) => seen.observe(figure.node));
}

/* ---- light and dark ---- */
const system = matchMedia("(prefers-color-scheme: dark)");
function setTheme(mode) {
  root.dataset.theme = mode;
  document.querySelectorAll("svg.swatch line").forEach((line) => line.setAttribute("stroke", colour(Number(line.parentNode.dataset.configuration))));
  again();
}
setTheme(system.matches ? "dark" : "light");
system.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => setTheme(theme() === "dark" ? "light" : "dark"));
addEventListener("beforeprint", () => figures.forEach((figure) => figure.drawn || figure.draw()));
build();
