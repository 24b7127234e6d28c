// The last updates, and one of them as a timeline: when each engine came to each stage.

import { byId, keyed, make, mark, row, say } from "./dom.js";
import { clock, millis, naturally, seconds, size, span, version, word } from "./words.js";

const COLUMNS = ["version", "number", "", "number", "number", "number"];
const LANES = 24;
let chosen = null;

/** Called when another update was chosen. */
let again = () => {};
export const onChoice = (call) => {
  again = call;
};

export function showUpdates(fleet, now) {
  const updates = fleet.updates;
  if (!updates.some((u) => u.update_id === chosen)) chosen = null;
  const shown = updates.find((u) => u.update_id === chosen) ?? updates[0];
  keyed(byId("update-rows"), updates, (u) => u.update_id, newRow, (element, update) =>
    fillRow(element, update, update === shown, now));
  byId("updates-none").hidden = updates.length > 0;
  byId("updates-some").hidden = !updates.length;
  showTimeline(shown, now);
}

function newRow(update) {
  const made = row(COLUMNS.length, COLUMNS);
  const button = make("button", "link");
  button.type = "button";
  button.addEventListener("click", () => {
    chosen = update.update_id;
    again();
  });
  made.firstElementChild.append(button);
  return made;
}

function fillRow(element, update, isShown, now) {
  const phase = word(update.phase, "UPDATE_PHASE_");
  const [began, went, decided] = times(update);
  const button = element.firstElementChild.firstElementChild;
  const applied = update.engines.filter((o) => o.stage === "UPDATE_STAGE_APPLIED" && !o.lost).length;
  say(button, version(update.version));
  mark(button, "aria-pressed", isShown ? "true" : "false");
  mark(element, "data-shown", isShown ? "yes" : "");
  const values = [
    update.step ?? (update.restores ? `restores ${version(update.restores)}` : ""),
    phase,
    between(began, went),
    between(began, decided) || (final(update) || began === null ? "" : span((now - began) / 1000)),
    `${applied} of ${update.engines.length}`,
  ];
  values.forEach((value, i) => say(element.children[i + 1], value));
  mark(element.children[2], "data-phase", phase);
}

const final = (update) => !["UPDATE_PHASE_PREPARING", "UPDATE_PHASE_GO"].includes(update.phase);
const times = (update) => [millis(update.begin_time), millis(update.go_time), millis(update.decide_time)];
const between = (from, to) => (from === null || to === null ? "" : span((to - from) / 1000));

function showTimeline(update, now) {
  byId("timeline").hidden = !update;
  if (!update) return;
  const [began, went, decided] = times(update);
  const bytes = Number(update.byte_count) ? `, ${size(update.byte_count)}` : "";
  const at = began === null ? "began before the coordinator's restart" : `began ${clock(update.begin_time)}`;
  const go = went === null ? "" : `, went after ${between(began, went)}`;
  const end = decided === null ? "" : `, ${word(update.phase, "UPDATE_PHASE_")} after ${between(began, decided)}`;
  say(byId("timeline-title"), `Version ${version(update.version)}${bytes}, ${at}${began === null ? "" : go + end}`);
  say(byId("timeline-cause"), update.cause);
  byId("timeline-cause").hidden = !update.cause;
  const plot = byId("timeline-plot");
  plot.hidden = began === null;
  if (began === null) return;
  const stages = update.engines.flatMap((o) => o.stage_times.map((s) => millis(s.time)));
  const last = Math.max(decided ?? now, ...stages, began + 1);
  const scale = { began, end: last, width: last - began };
  const lanes = slowestFirst(update, last).slice(0, LANES);
  const marks = [[went, "go"], [decided, word(update.phase, "UPDATE_PHASE_")]].filter(([when]) => when !== null);
  drawAxis(plot, scale, marks);
  drawLanes(plot, lanes, scale, update.engines.length - lanes.length);
}

/** Who came last to its last stage stands first where not all can be shown; else by name. */
function slowestFirst(update, end) {
  const last = (o) => (o.lost ? end + 1 : Math.max(0, ...o.stage_times.map((s) => millis(s.time))));
  const byName = (a, b) => naturally(a.engine.engine_id, b.engine.engine_id);
  const engines = [...update.engines];
  return engines.length > LANES ? engines.sort((a, b) => last(b) - last(a) || byName(a, b)) : engines.sort(byName);
}

const percent = (scale, when) => `${(((when - scale.began) / scale.width) * 100).toFixed(3)}%`;

function drawAxis(plot, scale, marks) {
  let axis = plot.querySelector(".axis");
  if (!axis) plot.append((axis = make("div", "axis")));
  axis.setAttribute("aria-hidden", "true");
  keyed(axis, [
    ...ticks(scale.width).map((at) => ({
      key: `t${at}`, text: at ? span(at / 1000) : "0", left: percent(scale, scale.began + at), kind: "tick",
    })),
    ...marks.map(([when, text]) => ({ key: text, text, left: percent(scale, when), kind: "mark" })),
  ], (item) => item.key, () => make("span"), (element, item) => {
    say(element, item.text);
    element.className = item.kind;
    element.style.left = item.left;
  });
}

/** Round times, about five of them. */
function ticks(width) {
  const rough = width / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  return Array.from({ length: Math.floor((width * 0.96) / step) + 1 }, (_, i) => i * step);
}

function drawLanes(plot, lanes, scale, hidden) {
  let list = plot.querySelector(".lanes");
  if (!list) plot.append((list = make("ul", "lanes")), make("p", "quiet"));
  keyed(list, lanes, (o) => o.engine.engine_id, newLane, (element, outcome) => fillLane(element, outcome, scale));
  say(plot.lastElementChild, hidden > 0 ? `and ${hidden} engines that were faster` : "");
}

function newLane() {
  const made = make("li");
  const bar = make("span", "lane");
  bar.setAttribute("aria-hidden", "true");
  made.append(make("span", "who"), bar, make("span", "unseen"));
  return made;
}

function fillLane(element, outcome, scale) {
  const [who, bar, text] = element.children;
  const parts = segments(outcome, scale);
  say(who, outcome.engine.engine_id);
  say(text, describe(outcome, parts));
  mark(element, "title", describe(outcome, parts));
  keyed(bar, parts, (p) => p.stage, () => make("i"), (piece, part) => {
    piece.className = part.stage;
    piece.style.left = percent(scale, part.from);
    piece.style.width = `${(((part.to - part.from) / scale.width) * 100).toFixed(3)}%`;
  });
}

function segments(outcome, scale) {
  const stamps = outcome.stage_times.map((s) => ({ stage: word(s.stage, "UPDATE_STAGE_"), at: millis(s.time) }));
  const parts = stamps.map((stamp, i) => ({
    stage: { ready: "waiting", aborted: "failed" }[stamp.stage] ?? stamp.stage,
    from: stamp.at,
    to: stamps[i + 1]?.at ?? scale.end,
  }));
  if (outcome.lost) {
    const from = stamps.at(-1)?.at ?? scale.began;
    parts.push({ stage: "failed", from: (from + scale.end) / 2, to: scale.end });
  }
  return parts;
}

function describe(outcome, parts) {
  const said = parts.map((p) => `${p.stage} ${span((p.to - p.from) / 1000)}`).join(", ") || "has not reported";
  const t = outcome.timings;
  const still = t ? ["wait", "quiesce", "install", "caches", "canary"].map((p) => [p, seconds(t[p])]) : [];
  const pause = still.length ? `; stood still ${still.filter(([, s]) => s > 0).map(([p, s]) => `${p} ${span(s)}`).join(", ")}` : "";
  const error = outcome.error_reason ? `; ${outcome.error_reason}: ${outcome.error_message}` : "";
  return `${said}${pause}${error}`;
}
