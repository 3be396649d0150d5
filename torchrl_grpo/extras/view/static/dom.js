// What all views share: elements, numbers, the address, and the server's answers.

export const COLORS = document.body.dataset.colors.split(" ");
const ACTIVITIES = JSON.parse(document.body.dataset.activities);

// Makes an element. Strings become text, never markup; a function is a listener; null leaves an attribute out.
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function activityColor(kind) {
  const own = [...kind].reduce((sum, letter) => sum + letter.codePointAt(0), 0);
  return ACTIVITIES[kind] ?? COLORS[own % COLORS.length];
}

// The corners of a marker around a point.
export function corners([count, turn], x, y, radius) {
  return Array.from({ length: count }, (_, at) => {
    const angle = 2 * Math.PI * (at / count + turn / 360) - Math.PI / 2;
    return [x + radius * Math.cos(angle), y + radius * Math.sin(angle)];
  });
}

// An entry's mark in a legend: the marker or the line of a series, or an area.
export function mark(color, line = null) {
  let shape = svg("rect", { width: 32, height: 8, fill: color });
  if (line?.sparse) shape = svg("polygon", { points: corners(line.corners, 16, 4, 4).join(" "), fill: color });
  else if (line) {
    const dash = line.dash.join(" ");
    shape = svg("line", { x2: 32, y1: 4, y2: 4, stroke: color, "stroke-width": 3, "stroke-dasharray": dash });
  }
  return svg("svg", { viewBox: "0 0 32 8", "aria-hidden": "true" }, shape);
}

// Both round as number and percent of torchrl_grpo/host/text.py do.
export function number(value) {
  if (!Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size < 1e-8) return "0";
  if (Number.isInteger(value) || size >= 999.5) return (Math.sign(value) * Math.round(size)).toLocaleString("en");
  const rounded = Number(value.toPrecision(3));
  return Math.abs(rounded) < 1e-4 ? rounded.toExponential() : String(rounded);
}

export function percent(value) {
  return Number.isFinite(value) ? `${(100 * value).toFixed(1)}%` : "-";
}

// Why a response ended, in words.
export function ending(reason) {
  return { stop: "end of text", length: "length limit" }[reason] ?? reason;
}

export function duration(seconds) {
  if (seconds < 100) return `${Number(seconds.toFixed(seconds < 10 ? 3 : 1))} s`;
  const units = seconds < 6000 ? [60, "min", 1, "s"] : seconds < 360000 ? [3600, "h", 60, "min"] : [86400, "d", 3600, "h"];
  const [long, longName, short, shortName] = units;
  const rest = Math.floor(seconds % long / short);
  return `${Math.floor(seconds / long)} ${longName}${rest ? ` ${rest} ${shortName}` : ""}`;
}

// The address holds the whole state: "#groups?run=1&split=test".
export function address() {
  const [view, query = ""] = location.hash.slice(1).split("?");
  return { view: view || "curves", params: new URLSearchParams(query) };
}

// A link to a view; what is empty is left out.
export function link(view, params) {
  const kept = [...new URLSearchParams(params)].filter(([, value]) => value !== "");
  return `#${view}${kept.length ? `?${new URLSearchParams(kept)}` : ""}`;
}

// Goes to another state of the view. One that is typed replaces the last, so that "back" leaves the view.
export function change(changes, replace = false) {
  const { view, params } = address();
  for (const [key, value] of Object.entries(changes)) params.set(key, value);
  const target = link(view, params);
  if (target === location.hash) return;
  if (replace) history.replaceState(null, "", target);
  else history.pushState(null, "", target);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

// An answer of the server. What went wrong is an Error with a sentence for the reader.
export async function get(name, params = {}) {
  const asked = link("", params).slice(1);
  let response;
  try {
    response = await fetch(`api/${name}${asked}`);
  } catch {
    throw new Error("The dashboard's server has stopped. To view a finished run: python -m torchrl_grpo view RUN");
  }
  const answer = await response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

export function field(label, input) {
  return el("label", {}, label, input);
}

// A select; options are [value, text]. With another choice some of the state begins anew.
export function choice(name, options, chosen, anew = {}) {
  const chooser = el("select", { name, change: (event) => change({ [name]: event.target.value, ...anew }) });
  chooser.append(...options.map(([value, text]) => el("option", { value, selected: String(value) === chosen }, text)));
  return chooser;
}

// Thumbnails of images; those that do not exist are left out.
export function pictures(images, run) {
  if (!images?.length) return null;
  return el("div", { class: "pictures" }, images.map((image, at) => el("img", {
    src: `image/${run || 0}/${encodeURIComponent(image)}`, alt: `image ${at + 1} of ${images.length}`,
    error: (event) => event.target.remove(),
  })));
}

// Which of several runs a view is about; nothing where there is one.
export function runChoice(runs, params) {
  if (runs.length < 2) return null;
  const anew = { page: "", from: "", to: "" };
  return field("run", choice("run", runs.map((run, at) => [at, run.name]), params.get("run") ?? "0", anew));
}

// A box that scrolls sideways, also by keyboard.
export function scroll(label, ...children) {
  return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, ...children);
}

// Lets options be walked through by arrow keys, pointed at and clicked; `show` is told which one is meant.
// The options need ids, and carry their place in data-at.
export function walk(box, count, show) {
  let at = -1;
  const option = (place) => box.querySelector(`[data-at="${place}"]`);
  const choose = (place, scrolls) => {
    option(at)?.removeAttribute("aria-selected");
    at = Math.max(0, Math.min(count - 1, place));
    const chosen = option(at);
    if (!chosen) return;
    chosen.setAttribute("aria-selected", "true");
    box.setAttribute("aria-activedescendant", chosen.id);
    if (scrolls) chosen.scrollIntoView({ block: "nearest" });
    show(at);
  };
  const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  box.addEventListener("keydown", (event) => {
    if (!(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    choose(at + moves[event.key], true);
  });
  box.addEventListener("pointerover", (event) => event.target.dataset?.at && show(Number(event.target.dataset.at)));
  box.addEventListener("pointerleave", () => at >= 0 && show(at));
  box.addEventListener("click", (event) => event.target.dataset?.at && choose(Number(event.target.dataset.at), false));
}
