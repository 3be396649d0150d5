// The panels of the report, of several runs overlaid, with a cursor that all panels share.

import { COLORS, change, el, field, get, number, percent } from "./dom.js";

const HEIGHT = 190;
const MARGIN = { left: 46, right: 10, top: 8, bottom: 22 };
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "14 4", "1 6", "10 3 2 3 2 3", "4 6"];

export function curves(box) {
  const grid = el("div", { class: "curves" });
  const choices = el("fieldset");
  const from = el("input", { type: "number", min: 0, change: () => change({ from: from.value }) });
  const to = el("input", { type: "number", min: 0, change: () => change({ to: to.value }) });
  box.append(
    el("h2", { class: "hidden" }, "Curves"),
    el("form", { submit: (event) => event.preventDefault() }, choices, field("from step", from), field("to step", to)),
    grid);
  let charts = [];
  let pointed = null;
  const point = (step) => {
    pointed = step;
    charts.forEach((chart) => chart.point(step));
  };
  let width = 0;
  new ResizeObserver(() => {
    if (grid.clientWidth === width) return;
    width = grid.clientWidth;
    charts.forEach((chart) => chart.draw());
  }).observe(grid);

  return async (params, runs) => {
    const hidden = (params.get("hide") ?? "").split(",").filter(Boolean);
    const asked = ["hide", "from", "to"].map((key) => [key, params.get(key) ?? ""]);
    const panels = await get("curves", Object.fromEntries(asked));
    return () => {
      for (const [name, input] of Object.entries({ from, to })) {
        if (input !== document.activeElement) input.value = params.get(name) ?? "";
      }
      if (runs.length > 1 && choices.childElementCount === 0) choices.append(...runChoices(runs));
      choices.querySelectorAll("input").forEach((input) => (input.checked = !hidden.includes(input.value)));
      const titles = panels.map((panel) => panel.title).join();
      if (titles !== charts.map((chart) => chart.title).join()) {
        charts = panels.map((panel) => makeChart(panel.title, panel.note, point));
        grid.replaceChildren(...charts.map((chart) => chart.figure));
      }
      const steps = d3.extent(panels.flatMap((panel) => panel.curves.flatMap((curve) => d3.extent(curve.steps))));
      charts.forEach((chart, at) => chart.set(panels[at], steps, runs.length > 1 ? runs : null));
      point(pointed);
      const reading = runs.some((run) => run.reading);
      if (!panels.length) grid.replaceChildren(el("p", {}, reading ? "Reading the run's files." : "No steps logged yet."));
    };
  };
}

function runChoices(runs) {
  return [el("legend", { class: "hidden" }, "Runs shown"), ...runs.map((run, at) => {
    const input = el("input", { type: "checkbox", value: at, change: () => {
      const boxes = [...input.closest("fieldset").querySelectorAll("input")];
      change({ hide: boxes.filter((one) => !one.checked).map((one) => one.value).join() });
    } });
    return el("label", { class: "row" }, input, swatch(COLORS[at % COLORS.length], ""), run.name);
  })];
}

function swatch(color, dash) {
  const svg = d3.create("svg").attr("viewBox", "0 0 32 8").attr("aria-hidden", "true");
  svg.append("line").attr("x2", 32).attr("y1", 4).attr("y2", 4).attr("stroke", color).attr("stroke-width", 3)
    .attr("stroke-dasharray", dash);
  return svg.node();
}

function makeChart(title, note, point) {
  const svg = d3.create("svg").attr("tabindex", 0).attr("role", "slider").attr("aria-label", `${title}, at a step`);
  const legend = el("ul", { class: "legend" });
  const about = note ? el("p", { class: "dim" }, note) : null;
  const figure = el("figure", {}, el("figcaption", {}, title), about, legend, svg.node());
  let panel = null;
  let steps = [0, 1];
  let lines = [];
  let cursor = null;
  let x = null;
  let y = null;
  const shown = (value) => (panel.percent ? percent(value) : number(value));

  function draw() {
    const width = figure.clientWidth - 24;
    if (!panel || width <= 0) return;
    svg.attr("viewBox", `0 0 ${width} ${HEIGHT}`).selectAll("*").remove();
    const pad = steps[0] === steps[1] ? 1 : 0;
    x = d3.scaleLinear().domain([steps[0] - pad, steps[1] + pad]).range([MARGIN.left, width - MARGIN.right]);
    y = d3.scaleLinear().domain(heights(panel, lines)).range([HEIGHT - MARGIN.bottom, MARGIN.top]);
    axes(svg, x, y, width, panel);
    const path = d3.line().x((d) => x(d[0])).y((d) => y(d[1]));
    for (const line of lines) {
      if (line.area) {
        const area = d3.area().x((d) => x(d[0])).y0((d) => y(d[1])).y1((d) => y(d[2]));
        svg.append("path").attr("fill", line.color).attr("d", area(line.area));
        continue;
      }
      if (line.smooth) stroke(svg, line, path(line.points), 0.8).attr("opacity", 0.4);
      stroke(svg, line, path(line.smooth ?? line.points), 1.8);
      if (!line.smooth) {
        for (const [step, value] of line.points) {
          svg.append("circle").attr("cx", x(step)).attr("cy", y(value)).attr("r", 2).attr("fill", line.color);
        }
      }
    }
    cursor = svg.append("line").attr("class", "cursor").attr("y1", MARGIN.top).attr("y2", HEIGHT - MARGIN.bottom)
      .attr("visibility", "hidden");
    tell(null);
  }

  // The values at a step, or the latest ones.
  function tell(step) {
    const at = step ?? steps[1];
    const texts = lines.map((line) => {
      const place = Math.min(d3.bisector((d) => d[0]).left(line.points, at), line.points.length - 1);
      const before = line.points[Math.max(place - 1, 0)];
      const nearest = Math.abs(before[0] - at) < Math.abs(line.points[place][0] - at) ? before : line.points[place];
      line.value.textContent = shown(nearest[1]);
      return `${line.label} ${shown(nearest[1])}`;
    });
    svg.attr("aria-valuemin", steps[0]).attr("aria-valuemax", steps[1]).attr("aria-valuenow", at)
      .attr("aria-valuetext", `step ${Math.round(at)}: ${texts.join(", ")}`);
    if (cursor) cursor.attr("visibility", step === null ? "hidden" : "visible").attr("x1", x(at)).attr("x2", x(at));
  }

  let now = null;
  const move = (step) => {
    now = step === null ? null : Math.max(steps[0], Math.min(steps[1], Math.round(step)));
    point(now);
  };
  svg.on("pointermove", () => x && move(x.invert(d3.mouse(svg.node())[0])));
  svg.on("pointerleave", () => move(null));
  svg.on("blur", () => move(null));
  svg.on("keydown", () => {
    const event = d3.event;
    const stride = event.shiftKey ? 10 : 1;
    const at = now ?? steps[1];
    const moves = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: steps[0], End: steps[1], Escape: null };
    if (!(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    move(moves[event.key]);
  });

  return {
    title,
    figure,
    draw,
    point: tell,
    set(found, range, runs) {
      [panel, steps] = [found, range];
      lines = linesOf(panel, runs);
      const entry = (line) => el("li", {}, swatch(line.color, line.dash), line.label, line.value);
      legend.replaceChildren(...lines.map(entry));
      draw();
    },
  };
}

// Colors tell runs apart where the page has several, and then dashes the metrics; else colors tell the metrics apart.
function linesOf(panel, runs) {
  const labels = [...new Set(panel.curves.map((curve) => curve.label))];
  let floor = null;
  return panel.curves.map((curve) => {
    const place = labels.indexOf(curve.label);
    const points = d3.zip(curve.steps, curve.values);
    const parts = runs ? [runs[curve.run].name, labels.length > 1 ? curve.label : ""] : [curve.label];
    const line = {
      label: parts.filter(Boolean).join(", "),
      color: curve.color ?? COLORS[(runs ? curve.run : place) % COLORS.length],
      dash: runs ? DASHES[place % DASHES.length] : "",
      points,
      smooth: curve.smooth ? d3.zip(curve.steps, curve.smooth) : null,
      value: el("b"),
    };
    if (panel.stacked) {
      const low = floor ?? points.map(() => 0);
      floor = points.map(([, value], at) => low[at] + value);
      line.area = points.map(([step], at) => [step, low[at], floor[at]]);
    }
    return line;
  });
}

function heights(panel, lines) {
  const values = lines.flatMap((line) => (line.area ?? line.points).flatMap((d) => d.slice(1)));
  const highest = d3.max(values) ?? 1;
  if (panel.title === "Accuracy") return [0, 1];
  if (panel.percent) return [0, Math.max(1.1 * highest, 0.01)];
  if (panel.stacked) return [0, highest];
  const [low, high] = d3.extent(values);
  const room = 0.08 * (high - low) || Math.abs(high) * 0.1 || 0.1;
  return [low > -room ? Math.max(0, low - room) : low - room, high + room];
}

function axes(svg, x, y, width, panel) {
  for (const tick of y.ticks(4)) {
    svg.append("line").attr("class", "grid").attr("x1", MARGIN.left).attr("x2", width - MARGIN.right)
      .attr("y1", y(tick)).attr("y2", y(tick));
    const text = panel.percent ? `${number(100 * tick)}%` : number(tick);
    svg.append("text").attr("x", MARGIN.left - 6).attr("y", y(tick) + 4).attr("text-anchor", "end").text(text);
  }
  for (const tick of x.ticks(5).filter(Number.isInteger)) {
    svg.append("text").attr("x", x(tick)).attr("y", HEIGHT - 6).attr("text-anchor", "middle").text(number(tick));
  }
}

function stroke(svg, line, path, width) {
  return svg.append("path").attr("fill", "none").attr("stroke", line.color).attr("stroke-width", width)
    .attr("stroke-dasharray", line.dash).attr("d", path);
}
