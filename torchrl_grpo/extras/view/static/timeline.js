// What each actor did over time: a lane each, and the same in a table.

import { COLORS, change, duration, el, get, number, percent, runChoice, scroll, walk } from "./dom.js";

// What an actor does in a span, and a color that is told from the others on white and on near-black.
const KINDS = {
  sample: ["generates responses", "#3b82f6"],
  score: ["computes rewards or reference log-probs", "#f59e0b"],
  train: ["optimizer steps", "#10b981"],
  publish: ["sends new weights to the engines", "#8b5cf6"],
  update: ["loads new weights", "#06b6d4"],
  wait: ["waits for the next batch", "#94a3b8"],
  evaluate: ["generates and scores test responses", "#ec4899"],
  save: ["writes logs and checkpoints", "#854d0e"],
  start: ["starts up", "#84cc16"],
  restart: ["restarts after a failure", "#dc2626"],
};
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
    body.replaceChildren(...(last.found.actors.length ? drawn(last.found, body.clientWidth) : none));
  }

  return async (params, runs) => {
    const asked = Object.fromEntries(["run", "from", "to"].map((key) => [key, params.get(key) ?? ""]));
    const found = await get("timeline", asked);
    return () => {
      const controls = form.childElementCount ? [] : [runChoice(runs, params), ...buttons(() => last.found)];
      form.append(...controls.filter(Boolean));
      last = { found, width: 0 };
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

function color(kind) {
  const own = [...kind].reduce((sum, letter) => sum + letter.codePointAt(0), 0);
  return KINDS[kind]?.[1] ?? COLORS[own % COLORS.length];
}

function drawn(found, width) {
  const hint = "Hover over a span, or step through them with the arrow keys.";
  const readout = el("p", { class: "readout", role: "status" }, hint);
  const { actors, first, last } = found;
  const inner = Math.max(width - 30, 100);
  const x = d3.scaleLinear().domain([first, last]).range([0, inner]);
  const height = actors.length * ROW + 24;
  const svg = d3.create("svg").attr("viewBox", `0 0 ${inner} ${height}`).attr("tabindex", 0)
    .attr("role", "listbox").attr("aria-label", "Spans");
  const spans = [];
  actors.forEach((actor, row) => {
    const top = row * ROW + 16;
    svg.append("text").attr("y", top - 4).attr("aria-hidden", "true").text(actor.name);
    svg.append("rect").attr("class", "lane").attr("y", top).attr("width", inner).attr("height", LANE);
    for (const [kind, start, end, step, low, high] of actor.spans) {
      const share = found.shares ? `${percent(high - low)} of ` : "";
      const text = `${actor.name}: ${kind}${step === null ? "" : `, step ${number(step)}`}, `
        + `${share}${duration(end - start)} starting at ${duration(start)}`;
      svg.append("rect").attr("x", x(start)).attr("width", Math.max(x(end) - x(start), 0.5))
        .attr("y", top + low * LANE)
        .attr("height", (high - low) * LANE).attr("fill", color(kind))
        .attr("role", "option").attr("id", `span-${spans.length}`).attr("data-at", spans.length).attr("aria-label", text);
      spans.push(text);
    }
    for (const time of actor.restarts.filter((one) => one >= first && one <= last)) {
      svg.append("path").attr("class", "restart").attr("d", `M${x(time) - 5},${top - 3}h10l-5,9z`)
        .attr("role", "option").attr("id", `span-${spans.length}`).attr("data-at", spans.length)
        .attr("aria-label", `${actor.name}: restart at ${duration(time)}`);
      spans.push(`${actor.name}: restart at ${duration(time)}`);
    }
  });
  const times = d3.scaleUtc().domain([1000 * first, 1000 * last]);
  let count = Math.max(2, Math.floor(inner / 120));
  while (count > 1 && times.ticks(count).length > inner / 100) count -= 1; // d3 may give more than it is asked for
  for (const tick of times.ticks(count).map((time) => time / 1000)) { // round minutes and hours
    svg.append("text").attr("x", x(tick)).attr("y", height - 4)
      .attr("text-anchor", x(tick) < 20 ? "start" : x(tick) > inner - 20 ? "end" : "middle")
      .attr("aria-hidden", "true").text(duration(tick));
  }
  walk(svg.node(), spans.length, (at) => (readout.textContent = spans[at]));
  const kinds = [...new Set(actors.flatMap((actor) => Object.keys(actor.seconds)))].sort();
  const lanes = "One lane per actor: a process, or one of several roles that take turns in a process. Gaps are idle time. " + (
    found.shares ? "There are too many spans to draw individually, so each column shows how its time was split; "
      + "zoom in to see individual spans." : "Overlapping spans share the height of their lane.");
  return [el("p", { class: "dim" }, lanes), legend(kinds), readout, el("div", { class: "lanes" }, svg.node()), table(actors, kinds, last - first)];
}

function legend(kinds) {
  return el("ul", { class: "legend" }, kinds.map((kind) => {
    const mark = d3.create("svg").attr("viewBox", "0 0 32 8").attr("aria-hidden", "true");
    mark.append("rect").attr("width", 32).attr("height", 8).attr("fill", color(kind));
    return el("li", {}, mark.node(), kind in KINDS ? `${kind}: ${KINDS[kind][0]}` : kind);
  }));
}

function table(actors, kinds, whole) {
  const share = (seconds) => (seconds ? `${percent(seconds / whole)}` : "-");
  return el("div", {}, el("h2", {}, "Where the time went"), scroll("Where the time went", el("table", { class: "facts" },
    el("thead", {}, el("tr", {}, ["actor", ...kinds, "restarts"].map((one) => el("th", { scope: "col" }, one)))),
    el("tbody", {}, actors.map((actor) => el("tr", {}, el("th", { scope: "row" }, actor.name),
      kinds.map((kind) => el("td", { class: "number" }, share(actor.seconds[kind]))),
      el("td", { class: "number" }, number(actor.restarts.length))))))));
}
