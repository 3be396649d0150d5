// Which view is shown, where the runs are, and the two views that are plain tables: alarms and configs.

import { address, change, duration, el, field, get, link, runChoice, scroll } from "./dom.js";
import { curves } from "./curves.js";
import { groups } from "./groups.js";
import { timeline } from "./timeline.js";
import { tokens } from "./tokens.js";

const POLL_MS = 2000;
const VIEWS = { curves, groups, tokens, timeline, alarms, config };
const FILES = { curves: "metrics", groups: "samples", timeline: "timeline", alarms: "metrics" };
const main = document.getElementById("main");
let runs = [];
let shown = { name: null, view: null, seen: null, turn: 0, asked: false };

// Shows what the address says. A view that stays is told its new state, so that a form keeps its focus.
async function show(grown = false) {
  const { view: name, params } = address();
  if (!(name in VIEWS)) return location.replace("#curves");
  const nav = name === "tokens" ? "groups" : name;
  for (const to of document.querySelectorAll("nav a")) {
    if (to.id === `to-${nav}`) to.setAttribute("aria-current", "page");
    else to.removeAttribute("aria-current");
  }
  if (shown.name !== name) {
    main.replaceChildren();
    shown = { name, view: VIEWS[name](main, runs), seen: null, turn: shown.turn, asked: false };
  }
  const seen = versions(name, params);
  if (grown && seen === shown.seen) return;
  shown.seen = seen;
  const turn = ++shown.turn;
  shown.asked ||= !grown; // until it is shown: the run may grow while the reader waits
  try {
    const finish = await shown.view(params, runs, !shown.asked);
    if (turn !== shown.turn) return;
    shown.asked = false;
    hush("of-view");
    finish?.();
  } catch (error) {
    if (turn !== shown.turn) return;
    shown.seen = null; // it is asked for again
    say(error, "of-view");
  }
}

function versions(name, params) {
  const of = name === "curves" ? runs : [runs[Number(params.get("run") ?? 0)]];
  return of.map((run) => [run?.versions[FILES[name]], name === "curves" && run?.reading]).join();
}

function say(error, of) {
  const before = main.querySelector(`.error.${of}`);
  if (before?.textContent === error.message) return;
  hush(of);
  main.prepend(el("p", { class: `bad error ${of}`, role: "alert" }, error.message));
}

function hush(of) {
  main.querySelector(`.error.${of}`)?.remove();
}

// Asks where the runs are; while nobody looks at the page, it asks nothing.
async function poll() {
  if (!document.hidden) {
    try {
      runs = await get("status");
      hush("of-server");
      tell();
      await show(true);
    } catch (error) {
      say(error, "of-server");
    }
  }
  setTimeout(poll, POLL_MS);
}

function tell() {
  const { params } = address();
  const alarms = runs[Number(params.get("run") ?? 0)]?.alarms ?? 0;
  document.getElementById("to-alarms").textContent = alarms ? `Alarms (${alarms})` : "Alarms";
  for (const name of ["groups", "timeline", "alarms"]) {
    document.getElementById(`to-${name}`).href = link(name, { run: params.get("run") ?? "" });
  }
  const ended = runs.filter((run) => run.ended);
  const rest = runs.filter((run) => !run.ended).map(where);
  document.getElementById("status").textContent = (runs.length > 3
    ? [...rest, `${ended.length} of ${runs.length} runs ended`] : runs.map(where)).join("; ");
}

function where(run) {
  const step = run.step === null ? "no steps yet" : `step ${run.step.toLocaleString("en")}`;
  if (run.ended) return `${run.name}: ended at ${step}`;
  return `${run.name}: ${step}${run.age === null ? "" : `, updated ${duration(Math.round(run.age))} ago`}`;
}

function alarms(box) {
  const form = el("form");
  const body = el("div");
  box.append(el("h2", {}, "Alarms"), form, body);
  return async (params, runs) => {
    const found = await get("alarms", { run: params.get("run") ?? "" });
    const steps = (one) => (one.first === one.last ? `${one.first}` : `${one.first} to ${one.last}`);
    const rows = found.map((one) =>
      el("tr", {}, el("td", { class: "number" }, steps(one)), el("td", { class: "bad" }, `${one.name}: ${one.text}`)));
    return () => {
      if (!form.childElementCount) form.append(...[runChoice(runs, params)].filter(Boolean));
      body.replaceChildren(found.length
        ? scroll("Alarms", el("table", { class: "facts" },
          el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "steps"), el("th", { scope: "col" }, "alarm"))),
          el("tbody", {}, rows)))
        : el("p", { class: "good" }, "No alarms."));
    };
  };
}

function config(box) {
  const body = el("tbody");
  const found = el("p", { class: "dim", role: "status" });
  const text = el("input", { type: "search", input: () => change({ text: text.value }, true) });
  const alone = el("input", { type: "checkbox", change: () => change({ all: alone.checked ? "" : "1" }) });
  let configs = null;
  return async (params, runs) => {
    if (configs === null) {
      configs = await get("config");
      const head = runs.map((run) => el("th", { scope: "col" }, runs.length > 1 ? run.name : "value"));
      box.replaceChildren(
        el("h2", {}, "Config"),
        el("form", { submit: (event) => event.preventDefault() }, field("key or value", text),
          runs.length > 1 && el("label", { class: "row" }, alone, "only differences")),
        found,
        scroll("Config", el("table", { class: "facts config" },
          el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "key"), head)), body)));
    }
    const asked = (params.get("text") ?? "").toLowerCase();
    if (text !== document.activeElement) text.value = params.get("text") ?? "";
    alone.checked = runs.length > 1 && !params.get("all");
    const keys = [...new Set(configs.flatMap((one) => Object.keys(one)))];
    const has = (texts) => texts.some((one) => one.toLowerCase().includes(asked));
    const rows = keys.map((key) => [key, configs.map((one) => one[key] ?? "-")])
      .filter(([key, values]) => (!alone.checked || new Set(values).size > 1) && has([key, ...values]));
    return () => {
      found.textContent = `${rows.length} of ${keys.length} keys`;
      body.replaceChildren(...rows.map(([key, values]) => {
        const differs = new Set(values).size > 1;
        const cell = (value) => el("td", {}, differs ? el("mark", {}, value) : value);
        return el("tr", {}, el("th", { scope: "row" }, key), values.map(cell));
      }));
    };
  };
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", () => {
  tell();
  show();
});
document.addEventListener("visibilitychange", () => show(true));
await poll();
