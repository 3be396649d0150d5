// A response as a strip of tokens, colored by one of the numbers that are known of them.

import { address, choice, el, ending, field, get, link, number, percent, pictures, walk } from "./dom.js";

// `cuts` part the values into classes: q0 to q5 from nothing to much, d0 to d6 from low to high around d3.
const COLORINGS = {
  log_prob: { label: "log-prob", cuts: [0.1, 0.5, 1, 2, 4], falls: true },
  ratio: { label: "ratio to the trainer", cuts: [0.5, 0.8, 0.95, 1.05, 1.25, 2] },
  kl: { label: "KL to the reference", cuts: [0.001, 0.01, 0.1, 0.5, 1] },
  entropy: { label: "entropy", cuts: [0.1, 0.5, 1, 2, 3] },
  advantage: { label: "advantage", cuts: [-1, -0.3, -1e-9, 1e-9, 0.3, 1] },
  mask: { label: "mask", cuts: [] },
};

export function tokens(box) {
  return async (params) => {
    const asked = { run: params.get("run") ?? "", row: params.get("row") ?? "" };
    const found = await get("response", asked);
    const strip = found.tokens;
    const by = strip?.values[params.get("by")] || params.get("by") === "mask" ? params.get("by") : "log_prob";
    return () => {
      box.replaceChildren(...[
        ...heading(found, asked),
        strip ? null : el("p", {}, "This run logged no tokens. The response as text:"),
        strip ? null : el("div", { class: "strip" }, el("span", { class: "turn" }, found.response)),
        ...(strip ? stripOf(strip, by) : []),
      ].filter(Boolean));
      if (strip) box.querySelector("[name=by]").value = by;
    };
  };
}

function heading(found, asked) {
  const at = found.group.indexOf(found.row);
  const by = address().params.get("by") ?? "";
  const near = (place, text) => place >= 0 && place < found.group.length
    ? el("a", { href: link("tokens", { ...asked, row: found.group[place], by }) }, text)
    : el("span", { class: "dim" }, text);
  const parts = Object.entries(found.parts ?? {}).map(([name, value]) => `${name} ${number(value)}`);
  const facts = [
    found.reward && `reward ${found.reward}`, ...parts,
    ...["advantage", "length", "version", "staleness"].filter((key) => key in found)
      .map((key) => (key === "length" ? `${number(found[key])} tokens` : `${key} ${number(found[key])}`)),
    found.finish_reason && `finished: ${ending(found.finish_reason)}`,
  ].filter(Boolean);
  return [
    el("h2", {}, `Step ${number(found.step)}, response ${at + 1} of ${found.group.length}`),
    el("p", { class: "pager" }, near(at - 1, "Previous response"), near(at + 1, "Next response"),
      el("a", { href: link("groups", { run: asked.run, split: found.split, from: found.step, to: found.step }) },
        `Groups of step ${number(found.step)}`)),
    el("p", {}, facts.join(" · ")),
    pictures(found.images, asked.run),
    el("div", { class: "prompt", tabindex: 0, role: "group", "aria-label": "Prompt" }, found.query),
  ];
}

function stripOf(strip, by) {
  const names = Object.keys(COLORINGS).filter((name) => name in strip.values || name === "mask");
  const hint = "Hover over a token, or step through them with the arrow keys.";
  const readout = el("p", { class: "readout", role: "status" }, hint);
  const turns = strip.turns.map((turn, at) => {
    const own = [];
    for (let place = turn.start; place < turn.end; place += 1) own.push(token(strip, by, place));
    return el("span", { class: turn.sampled ? "turn" : "turn given", role: "group", "aria-labelledby": `turn-${at}` },
      el("span", { class: "name", id: `turn-${at}`, role: "presentation" }, turn.label), own);
  });
  const name = `Tokens, colored by ${COLORINGS[by].label}`;
  const list = el("div", { class: "strip", role: "listbox", tabindex: 0, "aria-label": name }, turns);
  walk(list, strip.text.length, (at) => readout.replaceChildren(...told(strip, at)));
  return [
    el("form", {}, field("color by", choice("by", names.map((name) => [name, COLORINGS[name].label]), by))),
    el("ul", { class: "scale", "aria-label": "Colors" }, legend(by)),
    readout,
    list,
  ];
}

function token(strip, by, at) {
  const text = strip.text[at] === "" ? "·" : strip.text[at].replaceAll("\n", "⏎\n");
  const name = text.trim() === "" ? JSON.stringify(strip.text[at]) : null; // of spaces nothing would be read out
  const attributes = { role: "option", id: `token-${at}`, "data-at": at, "aria-label": name };
  return el("span", { class: `token ${color(strip, by, at)}`, ...attributes }, text);
}

function color(strip, by, at) {
  if (by === "mask") return strip.sampled[at] ? "q2" : "";
  const value = strip.values[by]?.[at];
  if (value === null || value === undefined) return "";
  const { cuts, falls } = COLORINGS[by];
  return `${cuts.length === 6 ? "d" : "q"}${cuts.filter((cut) => (falls ? -value : value) >= cut).length}`;
}

function legend(by) {
  const { cuts, falls } = COLORINGS[by];
  const say = (cut) => (Math.abs(cut) < 1e-6 ? "0" : number(falls ? -cut : cut));
  if (by === "mask") return [el("li", { class: "q2" }, "sampled, trained on"), el("li", {}, "not sampled")];
  const letter = cuts.length === 6 ? "d" : "q";
  return Array.from({ length: cuts.length + 1 }, (_, at) => {
    const [low, high] = [cuts[at - 1], cuts[at]];
    let text = `${say(low)} to ${say(high)}`;
    if (low === undefined) text = `${falls ? "above" : "below"} ${say(high)}`;
    else if (high === undefined) text = `${say(low)} and ${falls ? "below" : "above"}`;
    else if (say(low) === say(high)) text = say(low);
    return el("li", { class: `${letter}${at}` }, text);
  });
}

function told(strip, at) {
  const values = Object.entries(strip.values).filter(([, column]) => column[at] !== null).map(([name, column]) => {
    const chance = name === "log_prob" ? ` (${percent(Math.exp(column[at]))})` : "";
    return `${COLORINGS[name].label} ${number(column[at])}${chance}`;
  });
  const what = strip.sampled[at] ? values.join(", ") : "not sampled";
  return [el("b", {}, JSON.stringify(strip.text[at])), ` token ${at + 1} of ${number(strip.text.length)}: ${what}`];
}
