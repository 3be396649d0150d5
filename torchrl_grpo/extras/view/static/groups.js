// The groups: a prompt and its responses side by side, the newest first, filtered by what the address says.

import { change, choice, el, ending, field, get, link, number, pictures, runChoice, scroll } from "./dom.js";

const PAGE = 10;
const FACTS = {
  advantage: "advantage", length: "tokens", finish_reason: "finished", version: "version", staleness: "staleness",
};
const RANGES = [["from", "from step"], ["to", "to step"], ["least", "min reward"], ["most", "max reward"]];

export function groups(box) {
  const form = el("form", { role: "search", "aria-label": "Filter", submit: (event) => event.preventDefault() });
  const notice = el("p", { class: "notice", role: "status" });
  const list = el("div");
  const pager = el("nav", { class: "pager", "aria-label": "Pages" });
  box.append(el("h2", { class: "hidden" }, "Groups"), form, notice, list, pager);
  const order = choice("order", [["", "newest first"], ["spread", "by spread of rewards"]], "", { page: "" });
  form.append(field("order", order), ...RANGES.map(([name, label]) => field(label, typed(name, "number", { step: "any" }))),
    field("text in prompt or response", typed("text", "search")));
  let choices = [];
  let offered = "";
  let count = -1;
  let reading = true; // what the run wrote before: nothing of it is new

  return async (params, runs, grown) => {
    const asked = Object.fromEntries(params);
    const found = await get("groups", asked);
    return () => {
      const run = runs[Number(params.get("run") ?? 0)];
      const offers = [runs.length, params.get("run"), run?.splits, run?.datasets].join("|");
      if (offers !== offered) choices = renew(form, choices, runs, run, params);
      offered = offers;
      for (const input of form.querySelectorAll("input, select")) {
        if (input !== document.activeElement) input.value = params.get(input.name) ?? input.dataset.first ?? "";
      }
      const page = Number(params.get("page") ?? 0);
      if (grown && !reading && list.childElementCount && found.found > count) return offer(found.found - count);
      [count, reading] = [found.found, run?.reading];
      const counts = [found.found, found.all, found.rows].map(number);
      notice.textContent = `${counts[0]} of ${counts[1]} groups, ${counts[2]} responses in total`;
      list.replaceChildren(...found.groups.map((rows) => section(rows, asked)));
      for (const text of list.querySelectorAll(".prompt, .response")) {
        if (text.scrollHeight > text.clientHeight) text.tabIndex = 0; // to be scrolled by keyboard
      }
      pager.replaceChildren(...pages(page, Math.ceil(found.found / PAGE)));
    };
  };

  // What is being read stays where it is until the reader asks for what is new.
  function offer(more) {
    const show = () => {
      count = -1;
      list.replaceChildren();
      notice.replaceChildren();
      change({ page: "" });
      window.dispatchEvent(new HashChangeEvent("hashchange"));
    };
    const text = `Show ${number(more)} newer group${more > 1 ? "s" : ""}`;
    if (notice.textContent !== text) notice.replaceChildren(el("button", { type: "button", click: show }, text));
  }
}

// An input whose text is sent when nothing was typed for a moment.
function typed(name, type, more) {
  let waiting = 0;
  const input = el("input", { name, type, ...more, input: () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => change({ [name]: input.value, page: "" }, true), 250);
  } });
  return input;
}

// What can be chosen comes with the rows. The rest of the form stays, with what is being typed in it.
function renew(form, old, runs, run, params) {
  const options = (names) => [["", "any"], ...(names ?? []).map((name) => [name, name])];
  const focused = old.find((one) => one.contains(document.activeElement)) && document.activeElement.name;
  const choices = [
    runChoice(runs, params),
    field("split", choice("split", options(run?.splits), params.get("split"), { page: "" })),
    run?.datasets.length
      ? field("task", choice("dataset", options(run.datasets), params.get("dataset"), { page: "" }))
      : null,
  ].filter(Boolean);
  old.forEach((one) => one.remove());
  form.prepend(...choices);
  form.elements[focused]?.focus();
  const chooser = form.elements.run;
  if (chooser) chooser.dataset.first = "0";
  return choices;
}

function section(rows, asked) {
  const [first] = rows;
  const about = [`Step ${number(first.step)}`, first.split, first.dataset].filter(Boolean).join(", ");
  const parts = [...new Set(rows.flatMap((row) => Object.keys(row.parts ?? {})))];
  const facts = [
    ...parts.map((name) => [name, (row) => number(row.parts?.[name])]),
    ...Object.entries(FACTS).filter(([key]) => rows.some((row) => row[key] !== undefined))
      .map(([key, label]) => [label, (row) => (typeof row[key] === "string" ? ending(row[key]) : number(row[key]))]),
  ];
  // What all responses have in common is said once.
  const common = facts.filter(([, make]) => rows.every((row) => make(row) === make(first)));
  const shared = common.map(([label, make]) => `${label}: ${make(first)}`);
  if (rows.length > 1) shared.unshift("all responses");
  const cells = (make) => rows.map((row) => el("td", { class: row.wanted ? null : "other" }, make(row)));
  const line = (label, make) => el("tr", {}, el("th", { scope: "row" }, label), cells(make));
  const head = rows.map((row, at) => {
    const href = link("tokens", { run: asked.run ?? "", row: row.row });
    return el("th", { scope: "col" }, el("a", { href }, `response ${at + 1}`));
  });
  const text = (row) => el("div", { class: "response", role: "group", "aria-label": "Response" }, row.response);
  return el("section", {},
    el("h3", {}, about),
    common.length ? el("p", { class: "dim" }, shared.join(" · ")) : null,
    pictures(first.images?.filter((image) => rows.every((row) => row.images?.includes(image))), asked.run),
    el("div", { class: "prompt", role: "group", "aria-label": "Prompt" }, first.query),
    scroll(`Responses, ${about}`, el("table", { class: "group" },
      el("thead", {}, el("tr", {}, el("td", {}, el("span", { class: "hidden" }, "what")), head)),
      el("tbody", {},
        rows.some((row) => row.reward !== null)
          && line("reward", (row) => el("em", { class: row.good ? "good" : "bad" }, row.reward ?? "-")),
        facts.filter((fact) => !common.includes(fact)).map(([label, make]) => line(label, make)),
        line("text", text)))));
}

function pages(page, count) {
  const to = (label, target) =>
    el("button", { type: "button", disabled: target < 0 || target >= count, click: () => {
      change({ page: target || "" });
      document.getElementById("main").focus();
      window.scrollTo(0, 0);
    } }, label);
  if (count < 2) return [];
  const where = el("span", {}, `page ${number(page + 1)} of ${number(count)}`);
  return [to("Previous", page - 1), where, to("Next", page + 1), to("Last", count - 1)];
}
