// What each actor did over time: a lane each, and the same in a table.

import {
  activityColor, change, duration, el, get, mark, number, percent, runChoice, scroll, svg, walk,
} from "./dom.js";

// What an actor does in a span.
const KINDS = {
  sample: "generates responses",
  score: "computes rewards or reference log-probs",
  train: "optimizer steps",
  publish: "sends new weights to the engines",
  update: "loads new weights",
  wait: "waits for the next batch",
  evaluate: "generates and scores test responses",
  save: "writes logs and checkpoints",
  start: "starts up",
  restart: "restarts after a failure",
  stopped: "the run had ended, until it was resumed",
};
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const LANE = 24;
const ROW = 46;

export function timeline(box) {
  const body = el("div");
  const form = el("form", { submit: (event) => event.preventDefault() });
  box.append(el("h2", { class: "hidden" }, "Timeline"), form, body);
  let last = null;
  new ResizeObserver(() => last && body.clientWidth !== last.width && draw()).observe(body);

  function draw() {
    last.width = body.clientWidth;
    const none = [el("p", {}, "This run logged no timeline.")];
    const file = el("a", { href: `trace/${last.run}/trace.json.gz`, download: "trace.json.gz" }, "trace.json.gz");
    const trace = last.trace ? [el("p", {}, "Operators of the profiled steps, for ui.perfetto.dev: ", file)] : [];
    body.replaceChildren(...(last.found.actors.length ? drawn(last.found, body.clientWidth) : none), ...trace);
  }

  return async (params, runs) => {
    const asked = Object.fromEntries(["run", "from", "to"].map((key) => [key, params.get(key) ?? ""]));
    const found = await get("timeline", asked);
    return () => {
      const controls = form.childElementCount ? [] : [runChoice(runs, params), ...buttons(() => last.found)];
      form.append(...controls.filter(Boolean));
      const run = Number(asked.run);
      last = { found, width: 0, run, trace: runs[run]?.trace };
      if (body.querySelector(":focus-visible")) return; // somebody reads its spans
      draw();
    };
  };
}

// Changes of the part that is seen, as a share of its length to each side.
function buttons(found) {
  const move = (left, right) => {
    const { first, last, end } = found();
    const length = last - first;
    const from = Math.max(0, first + left * length);
    const to = Math.min(end, last + right * length);
    change(from <= 0 && to >= end ? { from: "", to: "" } : { from: from.toFixed(3), to: to.toFixed(3) });
  };
  const button = (text, left, right) => el("button", { type: "button", click: () => move(left, right) }, text);
  return [
    button("Zoom in", 0.25, -0.25), button("Zoom out", -0.5, 0.5),
    button("Earlier", -0.5, -0.5), button("Later", 0.5, 0.5),
    el("button", { type: "button", click: () => change({ from: "", to: "" }) }, "Whole run"),
  ];
}

function drawn(found, width) {
  const hint = "Hover over a span, or step through them with the arrow keys.";
  const readout = el("p", { class: "readout", role: "status" }, hint);
  const { actors, first, last } = found;
  const inner = Math.max(width - 30, 100);
  const x = (time) => (time - first) / (last - first || 1) * inner;
  const height = actors.length * ROW + 24;
  const told = [];
  const option = (name, attributes, text) => {
    const at = told.push(text) - 1;
    return svg(name, { ...attributes, role: "option", id: `span-${at}`, "data-at": at, "aria-label": text });
  };
  const lane = (actor, row) => {
    const top = row * ROW + 16;
    const spans = actor.spans.map(([kind, start, end, step, low, high]) => {
      const share = found.shares ? `${percent(high - low)} of ` : "";
      const text = `${actor.name}: ${kind}${step === null ? "" : `, step ${number(step)}`}, `
        + `${share}${duration(end - start)} starting at ${duration(start)}`;
      return option("rect", { x: x(start), width: Math.max(x(end) - x(start), 0.5), y: top + low * LANE,
        height: (high - low) * LANE, fill: activityColor(kind) }, text);
    });
    const restarts = actor.restarts.filter((one) => one >= first && one <= last).map((time) =>
      option("path", { class: "restart", d: `M${x(time) - 5},${top - 3}h10l-5,9z` },
        `${actor.name}: restart at ${duration(time)}`));
    return [
      svg("text", { y: top - 4, "aria-hidden": "true" }, actor.name),
      svg("rect", { class: "lane", y: top, width: inner, height: LANE }), ...spans, ...restarts,
    ];
  };
  const lanes = svg("svg", { viewBox: `0 0 ${inner} ${height}`, tabindex: 0, role: "listbox", "aria-label": "Spans" },
    actors.flatMap(lane), ticks(first, last, inner / 100).map(([time, text]) => svg("text", {
      x: x(time), y: height - 4, "aria-hidden": "true",
      "text-anchor": x(time) < 20 ? "start" : x(time) > inner - 20 ? "end" : "middle",
    }, text)));
  walk(lanes, told.length, (at) => (readout.textContent = told[at]));
  const kinds = [...new Set(actors.flatMap((actor) => Object.keys(actor.seconds)))].sort();
  const about = "One lane per actor: a process, or one of several roles that take turns in a process. Gaps are idle time. " + (
    found.shares ? "There are too many spans to draw individually, so each column shows how its time was split; "
      + "zoom in to see individual spans." : "Overlapping spans share the height of their lane.");
  return [el("p", { class: "dim" }, about), legend(kinds), readout, el("div", { class: "lanes" }, lanes), table(actors, kinds, last - first)];
}

// At most so many times, with names, all in one unit: round multiples of the largest unit that the part has twice.
function ticks(first, last, most) {
  const length = last - first;
  const [seconds, unit] = UNITS.find(([one]) => length >= 2 * one) ?? UNITS.at(-1);
  const least = length / seconds / Math.max(most, 2) || 1;
  const size = 10 ** Math.floor(Math.log10(least));
  const stride = [1, 2, 5, 10].find((one) => one * size >= least * (1 - 1e-9)) * size;
  const start = Math.ceil(first / seconds / stride - 1e-9);
  const count = Math.floor(last / seconds / stride + 1e-9) - start + 1;
  return Array.from({ length: count }, (_, at) => {
    const time = Number(((start + at) * stride).toPrecision(12));
    return [time * seconds, `${time.toLocaleString("en")} ${unit}`];
  });
}

function legend(kinds) {
  return el("ul", { class: "legend" }, kinds.map((kind) =>
    el("li", {}, mark(activityColor(kind)), kind in KINDS ? `${kind}: ${KINDS[kind]}` : kind)));
}

function table(actors, kinds, whole) {
  const share = (seconds) => (seconds ? `${percent(seconds / whole)}` : "-");
  return el("div", {}, el("h2", {}, "Where the time went"), scroll("Where the time went", el("table", { class: "facts" },
    el("thead", {}, el("tr", {}, ["actor", ...kinds, "restarts"].map((one) => el("th", { scope: "col" }, one)))),
    el("tbody", {}, actors.map((actor) => el("tr", {}, el("th", { scope: "row" }, actor.name),
      kinds.map((kind) => el("td", { class: "number" }, share(actor.seconds[kind]))),
      el("td", { class: "number" }, number(actor.restarts.length))))))));
}
