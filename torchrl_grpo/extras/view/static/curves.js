// Panels of metrics, of several runs overlaid, with a cursor that all panels share. uPlot draws them.

import { COLORS, activityColor, change, choice, corners, duration, el, field, get, mark, number, percent } from "./dom.js";

const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [14, 4], [1, 6], [10, 3, 2, 3, 2, 3], [4, 6]];
const CORNERS = [[24, 0], [3, 0], [4, 0], [4, 45], [3, 180], [5, 0], [6, 0], [8, 0]]; // of a marker, and its turn in degrees
const OVER = [["", "step"], ["tokens", "tokens"], ["time", "wall time"]];
const SMOOTHING = [["0", "none"], ["0.05", "5% of the points"], ["", "10% of the points"], ["0.3", "30% of the points"]];
const REMEMBERED = "panels="; // in a cookie: each dashboard has a port of its own, and storage belongs to a port
const dark = matchMedia("(prefers-color-scheme: dark)");

export function curves(box) {
  const grid = el("div", { class: "curves" });
  const choices = el("fieldset");
  const picker = makePicker();
  const from = el("input", { type: "number", min: 0, change: () => change({ from: from.value }) });
  const to = el("input", { type: "number", min: 0, change: () => change({ to: to.value }) });
  const over = choice("over", OVER, "");
  const smoothing = choice("smoothing", SMOOTHING, "");
  box.append(
    el("h2", { class: "hidden" }, "Curves"),
    el("form", { submit: (event) => event.preventDefault() }, choices, field("from step", from), field("to step", to),
      field("horizontal axis", over), field("smoothing", smoothing)),
    picker.box,
    grid);
  let charts = [];
  let pointed = null;
  const point = (place) => {
    pointed = place;
    charts.forEach((chart) => chart.point(place));
  };
  dark.addEventListener("change", () => charts.forEach((chart) => chart.draw()));

  return async (params, runs) => {
    const hidden = (params.get("hide") ?? "").split(",").filter(Boolean);
    const toggled = params.get("panels") ?? remembered();
    const keys = ["hide", "from", "to", "over", "smoothing"];
    const asked = { panels: toggled, ...Object.fromEntries(keys.map((key) => [key, params.get(key) ?? ""])) };
    const found = await get("curves", asked);
    return () => {
      for (const [name, input] of Object.entries({ from, to, over, smoothing })) {
        if (input !== document.activeElement) input.value = params.get(name) ?? "";
      }
      if (runs.length > 1 && choices.childElementCount === 0) choices.append(...runChoices(runs));
      choices.querySelectorAll("input").forEach((input) => (input.checked = !hidden.includes(input.value)));
      picker.set(found.choices, toggled.split("\n").filter(Boolean));
      const titles = found.panels.map((panel) => panel.title).join();
      if (titles !== charts.map((chart) => chart.title).join()) {
        charts = found.panels.map((panel) => makeChart(panel, point));
        grid.replaceChildren(...charts.map((chart) => chart.figure));
      }
      const lines = found.panels.map((panel) => linesOf(panel, runs.length > 1 ? runs : null));
      const places = lines.flat().flatMap((line) => [line.places[0], line.places.at(-1)]);
      const range = [Math.min(...places), Math.max(...places)];
      const logs = (params.get("log") ?? "").split("\n");
      charts.forEach((chart, at) => chart.set(found.panels[at], lines[at], {
        range, over: asked.over, log: logs.includes(chart.title), asked,
      }));
      point(pointed);
      const reading = runs.some((run) => run.reading);
      if (!found.choices.length) {
        grid.replaceChildren(el("p", {}, reading ? "Reading the run's files." : "No steps logged yet."));
      } else if (!charts.length) grid.replaceChildren(el("p", {}, "No panel is chosen."));
    };
  };
}

function runChoices(runs) {
  return [el("legend", { class: "hidden" }, "Runs shown"), ...runs.map((run, at) => {
    const input = el("input", { type: "checkbox", value: at, change: () => {
      const boxes = [...input.closest("fieldset").querySelectorAll("input")];
      change({ hide: boxes.filter((one) => !one.checked).map((one) => one.value).join() });
    } });
    return el("label", { class: "row" }, input, mark(COLORS[at % COLORS.length]), run.name);
  })];
}

function remembered() {
  const cookie = document.cookie.split("; ").find((one) => one.startsWith(REMEMBERED)) ?? "";
  try {
    return decodeURIComponent(cookie.slice(REMEMBERED.length));
  } catch {
    return ""; // another program on this machine wrote it
  }
}

// All panels there are, to be searched and chosen from; what differs from the default is remembered.
function makePicker() {
  const list = el("div", { class: "picks" });
  const search = el("input", { type: "search", input: () => filter() });
  const summary = el("summary", {}, "Metrics");
  const box = el("details", { class: "picker" }, summary,
    el("form", { submit: (event) => event.preventDefault() }, field("search metrics", search)), list);
  let offered = "";
  let toggled = [];
  const toggle = (title) => {
    toggled = toggled.includes(title) ? toggled.filter((one) => one !== title) : [...toggled, title];
    const text = toggled.join("\n");
    document.cookie = `${REMEMBERED}${encodeURIComponent(text)}; path=/; max-age=31536000; samesite=strict`;
    change({ panels: text });
  };
  const filter = () => {
    for (const section of list.children) {
      const rows = [...section.querySelectorAll("label")];
      rows.forEach((row) => (row.hidden = !row.textContent.toLowerCase().includes(search.value.toLowerCase())));
      section.hidden = rows.every((row) => row.hidden);
    }
  };
  const set = (choices, now) => {
    toggled = now;
    const shown = choices.filter((one) => one.shown).length;
    summary.textContent = `Metrics (${shown} of ${choices.length} shown)`;
    const titles = choices.map((one) => one.title).join("\n");
    if (titles !== offered) {
      const sections = [...new Set(choices.map((one) => one.section))];
      list.replaceChildren(...sections.map((section) => el("fieldset", {}, el("legend", {}, section),
        choices.filter((one) => one.section === section).map((one) => el("label", { class: "row" },
          el("input", { type: "checkbox", value: one.title, change: () => toggle(one.title) }), one.title)))));
      offered = titles;
      filter();
    }
    const boxes = new Map([...list.querySelectorAll("input")].map((input) => [input.value, input]));
    choices.forEach((one) => (boxes.get(one.title).checked = one.shown));
  };
  return { box, set };
}

// Colors tell runs apart where the page has several, and then dashes or markers the metrics; else colors the metrics.
function linesOf(panel, runs) {
  const labels = [...new Set(panel.curves.map((curve) => curve.label))];
  return panel.curves.map((curve) => {
    const at = labels.indexOf(curve.label);
    const parts = runs ? [runs[curve.run].name, labels.length > 1 ? curve.label : ""] : [curve.label];
    const form = runs ? at : Math.floor(at / COLORS.length);
    return {
      ...curve,
      places: curve.places ?? curve.steps,
      label: parts.filter(Boolean).join(", "),
      run: runs?.[curve.run].name ?? "",
      color: panel.stacked ? activityColor(curve.label) : COLORS[(runs ? curve.run : at) % COLORS.length],
      dash: DASHES[form % DASHES.length],
      corners: CORNERS[form % CORNERS.length],
      value: el("b"),
    };
  });
}

function makeChart({ title, note }, point) {
  const plot = el("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": `${title}, at a step` });
  const legend = el("ul", { class: "legend" });
  const button = (text, name, click) => el("button", { type: "button", "aria-label": `${title}: ${name}`, click }, text);
  const log = button("log", "log axis", () => {
    const logs = new Set((new URLSearchParams(location.hash.split("?")[1]).get("log") ?? "").split("\n").filter(Boolean));
    if (!logs.delete(title)) logs.add(title);
    change({ log: [...logs].join("\n") });
  });
  const tools = el("span", { class: "tools" }, log,
    button("CSV", "values as CSV", async () => {
      const { panels } = await get("curves", { ...shown.asked, points: 1e9 });
      save(`${title}.csv`, new Blob([csv(panels.find((one) => one.title === title), lines)], { type: "text/csv" }));
    }),
    button("PNG", "picture as PNG", () => picture(title, lines, chart).toBlob((blob) => save(`${title}.png`, blob))));
  const figure = el("figure", {}, el("figcaption", {}, title, tools),
    note ? el("p", { class: "dim" }, note) : null, legend, plot);
  let panel = null;
  let lines = [];
  let shown = null;
  let chart = null;
  let quiet = false; // the cursor is set by another panel
  const text = (value) => (panel.percent ? percent(value) : number(value));
  const place = (at) => (shown.over === "time" ? duration(at) : number(Math.round(at)));

  function draw() {
    chart?.destroy();
    const size = { width: plot.clientWidth, height: plot.clientHeight };
    chart = new uPlot(options(panel, lines, shown, size, hooks, text, place), tableOf(panel, lines, shown.log), plot);
  }
  new ResizeObserver(() => {
    chart?.setSize({ width: plot.clientWidth, height: plot.clientHeight });
  }).observe(plot);

  // The values at a place of the axis or, where it has none, the last ones before it; without a place the latest.
  function tell(at) {
    if (!shown) return "";
    const end = at ?? shown.range[1];
    const texts = lines.map((line) => {
      const index = line.places.findLastIndex((one) => one <= end + 1e-9);
      const step = Math.round(line.steps[index]);
      const said = index < 0 ? "-" : text(line.values[index]);
      const when = line.sparse && index >= 0 && line.places[index] !== end ? ` (step ${number(step)})` : "";
      line.value.textContent = said + when;
      return `${line.label} ${said}${when}`;
    });
    const where = shown.over ? `${place(end)}${shown.over === "tokens" ? " tokens" : ""}` : `step ${place(end)}`;
    const values = { now: end, text: `${where}: ${texts.join(", ")}`, min: shown.range[0], max: shown.range[1] };
    for (const [name, value] of Object.entries(values)) plot.setAttribute(`aria-value${name}`, value);
    return where;
  }

  let now = null;
  const move = (at) => {
    if (!shown) return;
    const near = shown.over ? at : Math.round(at);
    now = at === null ? null : Math.max(shown.range[0], Math.min(shown.range[1], near));
    point(now);
  };
  const hooks = {
    setCursor: [(self) => !quiet && move(self.cursor.left >= 0 ? self.posToVal(self.cursor.left, "x") : null)],
    setSelect: [(self) => {
      const ends = [self.select.left, self.select.left + self.select.width].map((at) => self.posToVal(at, "x"));
      const inside = lines.flatMap((line) => line.steps.filter((_, at) =>
        line.places[at] >= ends[0] && line.places[at] <= ends[1]));
      if (self.select.width > 0 && inside.length) {
        change({ from: Math.floor(Math.min(...inside)), to: Math.ceil(Math.max(...inside)) });
      }
    }],
  };
  plot.addEventListener("blur", () => move(null));
  plot.addEventListener("keydown", (event) => {
    if (!shown) return;
    const stride = (event.shiftKey ? 10 : 1) * (shown.over ? (shown.range[1] - shown.range[0]) / 100 : 1);
    const at = now ?? shown.range[1];
    const moves = {
      ArrowLeft: at - stride, ArrowRight: at + stride, Home: shown.range[0], End: shown.range[1], Escape: null,
    };
    if (!(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    move(moves[event.key]);
  });

  const readout = el("span", { class: "dim at", "aria-hidden": "true" });
  plot.append(readout);
  return {
    title,
    figure,
    draw,
    point(at) {
      const where = tell(at);
      readout.textContent = at === null ? "" : where;
      quiet = true;
      chart?.setCursor(at === null ? { left: -10, top: -10 } : { left: chart.valToPos(at, "x"), top: 0 });
      quiet = false;
    },
    set(...given) {
      [panel, lines, shown] = given;
      log.setAttribute("aria-pressed", shown.log);
      legend.replaceChildren(...lines.map((line) =>
        el("li", {}, mark(line.color, panel.stacked ? null : line), line.label, line.value)));
      if (legend.scrollHeight > legend.clientHeight) legend.tabIndex = 0;
      draw();
    },
  };
}

// What uPlot draws: places, then the values of each series, with nothing where it has none.
function tableOf(panel, lines, log) {
  if (panel.stacked) {
    let floor = lines[0].values.map(() => 0);
    const tops = lines.map((line) => (floor = line.values.map((value, at) => floor[at] + value)));
    return [lines[0].places, ...tops.reverse()]; // each is painted over what reaches higher
  }
  return uPlot.join(lines.flatMap((line) => [line.values, line.smoothed].filter(Boolean)
    .map((values) => [line.places, log ? values.map((value) => (value > 0 ? value : null)) : values])));
}

function options(panel, lines, { range, over, log }, size, hooks, text, place) {
  const style = getComputedStyle(document.body);
  const [ink, line, card] = ["--dim", "--line", "--card"].map((name) => style.getPropertyValue(name));
  const alone = range[0] === range[1];
  const positive = log && !panel.stacked && lines.some((one) => one.values.some((value) => value > 0));
  const axis = { stroke: ink, font: "11px system-ui, sans-serif", ticks: { show: false } };
  const top = panel.heights?.[1] ?? Math.max(...lines[0].values.map((_, at) =>
    lines.reduce((sum, one) => sum + one.values[at], 0)));
  return {
    ...size,
    hooks,
    padding: [8, 12, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { show: false }, drag: { setScale: false }, bind: {
      dblclick: () => () => change({ from: "", to: "" }),
    } },
    scales: {
      x: { time: false, range: alone ? [range[0] - 1, range[1] + 1] : range },
      y: positive ? { distr: 3 } : { range: panel.heights ?? [0, top] },
    },
    axes: [
      { ...axis, size: 26, grid: { show: false }, incrs: over === "time" ? TIMES : STEPS,
        values: (_, all) => all.map((at) => (at === null ? "" : place(at))) },
      { ...axis, size: 52, grid: { stroke: line, width: 1 }, values: (_, all) => all.map((at) =>
        (at === null ? "" : panel.percent ? `${number(100 * at)}%` : text(at))) },
    ],
    series: [{}, ...(panel.stacked ? [...lines].reverse().map((one) => ({ fill: one.color, width: 0, points: { show: false } }))
      : lines.flatMap((one) => seriesOf(one, card, positive)))],
  };
}

const TIMES = [[0.1, 0.2, 0.5], [1, 2, 5, 10, 15, 30], [1, 2, 5, 10, 15, 30], [1, 2, 6, 12]]
  .flatMap((counts, at) => counts.map((count) => count * [1, 1, 60, 3600][at])).concat([1, 2, 5, 10].map((days) => 86400 * days));
const STEPS = [1, 2, 5].flatMap((digit) => [...Array(14).keys()].map((zeros) => digit * 10 ** zeros)).sort((a, b) => a - b);

function seriesOf(line, card, positive) {
  const common = { stroke: line.color, dash: line.dash, spanGaps: true, points: { show: false } };
  if (line.sparse) return [{ ...common, paths: () => null, points: { show: true, fill: line.color, paths: markers(line) } }];
  if (line.smoothed) return [{ ...common, width: 1, alpha: 0.4 }, { ...common, width: 2 }];
  return [{ ...common, width: 2, points: { show: true, size: 5, fill: line.color } }];
}

function markers(line) {
  return (self, series, first, last) => {
    const fill = new Path2D();
    for (let at = first; at <= last; at += 1) {
      const value = self.data[series][at];
      if (value === null || value === undefined) continue;
      const [x, y] = [self.valToPos(self.data[0][at], "x", true), self.valToPos(value, "y", true)];
      corners(line.corners, x, y, 4 * uPlot.pxRatio).forEach((corner, nth) => fill[nth ? "lineTo" : "moveTo"](...corner));
      fill.closePath();
    }
    return { fill, stroke: null, clip: null, flags: 3 };
  };
}

function csv(panel, lines) {
  const quoted = (value) => `"${String(value).replaceAll('"', '""')}"`;
  const rows = panel.curves.flatMap((curve, at) => curve.steps.map((step, place) =>
    [quoted(lines[at]?.run ?? ""), quoted(curve.metric), step, curve.values[place]].join()));
  return ["run,metric,step,value", ...rows, ""].join("\n");
}

// The panel with its title and legend.
function picture(title, lines, chart) {
  const { canvas } = chart.ctx;
  const scale = uPlot.pxRatio;
  const head = (34 + 18 * lines.length) * scale;
  const whole = el("canvas", { width: canvas.width, height: canvas.height + head });
  const pen = whole.getContext("2d");
  const style = getComputedStyle(document.body);
  pen.fillStyle = style.getPropertyValue("--card");
  pen.fillRect(0, 0, whole.width, whole.height);
  pen.fillStyle = style.getPropertyValue("--ink");
  pen.font = `600 ${14 * scale}px system-ui, sans-serif`;
  pen.fillText(title, 12 * scale, 22 * scale);
  pen.font = `${12 * scale}px system-ui, sans-serif`;
  lines.forEach((line, at) => {
    const y = (44 + 18 * at) * scale;
    pen.fillStyle = line.color;
    pen.fillRect(12 * scale, y - 7 * scale, 18 * scale, 4 * scale);
    pen.fillStyle = style.getPropertyValue("--ink");
    pen.fillText(`${line.label} ${line.value.textContent}`, 38 * scale, y);
  });
  pen.drawImage(canvas, 0, head);
  return whole;
}

function save(name, blob) {
  const href = URL.createObjectURL(blob);
  el("a", { href, download: name.replaceAll("/", "-") }).click();
  URL.revokeObjectURL(href);
}
