// The engines: at a glance, by state, and one by one.

import { byId, keyed, make, mark, row, say } from "./dom.js";
import { UNKNOWN, age, millis, name, naturally, same, size, state, version, word } from "./words.js";

const ORDER = ["poisoned", "dead", "stalled", UNKNOWN, "empty", "starting", "stopping", "draining", "held", "asleep",
  "receiving", "installing", "ready", "serving"];
const COLUMNS = ["", "", "version", "version", "number", "", "number", "number", "", "", "number", "why"];

export function showFleet(fleet, now) {
  const engines = [...fleet.engines].sort((a, b) => naturally(name(a), name(b)));
  keyed(byId("glance"), engines, name, cell, (element, engine) => fillCell(element, engine, fleet));
  showLegend(engines);
  showRows(fleet, engines, now);
}

function cell(engine) {
  const made = make("li");
  const link = make("a");
  link.href = `#engine-${name(engine)}`;
  made.append(link);
  return made;
}

function fillCell(element, engine, fleet) {
  const link = element.firstElementChild;
  const held = engine.known && engine.status.applied ? version(engine.status.applied) : "holds nothing that is known";
  const text = `${name(engine)}: ${state(engine)}, ${held}${isBehind(engine) ? `, ${lagOf(engine)} behind` : ""}`;
  mark(link, "aria-label", text);
  mark(link, "title", text);
  mark(link, "data-state", state(engine));
  mark(link, "data-behind", isBehind(engine) ? "yes" : "");
  say(link, fleet.engines.length > 40 ? "" : name(engine));
}

function showLegend(engines) {
  const counts = new Map();
  for (const engine of engines) counts.set(state(engine), (counts.get(state(engine)) ?? 0) + 1);
  const items = [...counts].sort(([a], [b]) => rank(a) - rank(b));
  keyed(byId("legend"), items, ([word]) => word, legendItem, (element, [word, count]) => {
    mark(element.firstElementChild, "data-state", word);
    say(element.lastElementChild, `${count} ${word}`);
  });
}

function legendItem() {
  const made = make("li");
  made.append(make("i", "dot"), make("span"));
  return made;
}

const rank = (word) => (ORDER.includes(word) ? ORDER.indexOf(word) : ORDER.length);

function showRows(fleet, engines, now) {
  const wanted = byId("find").value.trim().toLowerCase();
  const odd = byId("odd").checked;
  const shown = engines.filter((engine) => {
    const text = `${name(engine)} ${state(engine)} ${engine.group} ${engine.unit}`.toLowerCase();
    return text.includes(wanted) && !(odd && state(engine) === "serving");
  });
  say(byId("shown"), shown.length === engines.length ? "" : `${shown.length} of ${engines.length}`);
  keyed(byId("engine-rows"), shown, name, () => row(COLUMNS.length, COLUMNS), (element, engine) =>
    fillRow(element, engine, fleet, now));
}

function fillRow(element, engine, fleet, now) {
  const status = engine.status;
  const known = engine.known;
  const served = fleet.state.models.find((m) => m.model === status.model)?.served ?? [];
  const fits = served.some((v) => same(v, status.applied));
  mark(element, "id", `engine-${name(engine)}`);
  mark(element, "data-state", state(engine));
  const values = [
    name(engine),
    state(engine),
    known ? version(status.applied) || "unset" : UNKNOWN,
    served.map(version).join(", ") || "nothing yet",
    lagOf(engine),
    known ? (status.gate_open ? "open" : "shut") : UNKNOWN,
    known ? String(status.live_requests) : "",
    known ? String(status.waiting_requests || "") : "",
    known ? progress(status.update, engine) : "",
    known && status.applied ? word(engine.verification, "VERIFICATION_") : "",
    age(Math.max(0, (now - millis(engine.report_time)) / 1000)),
    why(engine),
  ];
  values.forEach((value, i) => say(element.children[i], value));
  mark(element.children[1], "data-state", state(engine));
  mark(element.children[2], "data-fits", known && status.applied && !fits ? "no" : "");
  mark(element.children[4], "data-fits", isBehind(engine) ? "no" : "");
}

/** Commits behind; empty where nobody knows. */
const lagOf = (engine) => (engine.lag === undefined || !engine.known ? "" : String(engine.lag));

const isBehind = (engine) => Number(lagOf(engine)) > 0;

function progress(update, engine) {
  if (engine.catch_up) return "from a checkpoint";
  const stage = word(update?.stage, "UPDATE_STAGE_");
  if (stage === "receiving") return `${version(update.version)}: ${size(update.bytes_received)}`;
  if (stage === "ready" || stage === "installing") return `${version(update.version)}: ${stage}`;
  return stage === "aborted" || stage === "failed" ? `${version(update.version)}: ${stage}` : "";
}

/** With its owner; of an update that is no name that says anything to people. */
function hold({ kind, owner }) {
  const what = word(kind, "HOLD_KIND_");
  return owner && kind !== "HOLD_KIND_UPDATING" ? `${what} (${owner})` : what;
}

function why(engine) {
  if (!engine.known) return `last said: ${engine.status.word}`;
  const status = engine.status;
  if (status.poison_cause) return status.poison_cause;
  const holds = status.holds.map(hold).join(", ");
  if (holds) return holds;
  if (engine.kept) return `kept at ${version(engine.kept)}`;
  if (status.gate_open) return "";
  const gate = engine.conditions.find((c) => c.type === "GateOpen");
  if (!gate || gate.status === "CONDITION_STATUS_TRUE") return "";
  const told = engine.conditions.find((c) => c.reason === gate.reason && c.message);
  return told ? told.message : gate.reason;
}
