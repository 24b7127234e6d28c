// Who sends what to whom: the slots of ranks, the way the bytes go, the engines.

import { byId, keyed, make, mark, row, say } from "./dom.js";
import { naturally, state, word } from "./words.js";

const CHIPS = 60;

export function showTopology(fleet) {
  const states = new Map(fleet.engines.map((e) => [e.status.engine.engine_id, state(e)]));
  const groups = fleet.plans.flatMap((plan) => grouped(plan));
  byId("topology-none").hidden = groups.length > 0;
  byId("topology-some").hidden = !groups.length;
  keyed(byId("topology-rows"), groups, (g) => g.key, () => row(4, ["", "", "", "why"]), (element, group) =>
    fill(element, group, states));
}

/** Engines that one slot feeds in one way are one row. */
function grouped({ model, plan }) {
  const groups = new Map();
  for (const a of plan.assignments) {
    const by = [word(a.transport, "TRANSPORT_"), a.apply === "APPLY_STREAMING" ? "streaming" : ""];
    if (a.link) by.push(`link ${a.link}, fate ${word(a.fate, "LINK_FATE_")}`);
    if (a.base) by.push("delta");
    const way = by.filter(Boolean).join(", ");
    const key = `${model} ${a.ranks.join(",")} ${way} ${a.reason}`;
    const group = groups.get(key) ?? { key, model, ranks: a.ranks, way, reason: a.reason, engines: [] };
    group.engines.push(a);
    groups.set(key, group);
  }
  return [...groups.values()];
}

function fill(element, group, states) {
  const [slot, way, engines, reason] = element.children;
  say(slot, slotText(group));
  say(way, group.way);
  say(reason, group.reason);
  if (!engines.firstElementChild) engines.append(make("ul", "chips"));
  const sorted = group.engines.sort((a, b) => naturally(a.engine.engine_id, b.engine.engine_id));
  const shown = sorted.slice(0, CHIPS).map((a) => ({ id: a.engine.engine_id, required: a.required }));
  const more = sorted.length - shown.length;
  keyed(engines.firstElementChild, more ? [...shown, { id: `and ${more} more`, required: true }] : shown,
    (e) => e.id, () => make("li"), (chip, engine) => {
      say(chip, engine.required ? engine.id : `${engine.id} (optional)`);
      mark(chip, "data-state", states.get(engine.id) ?? "unknown");
    });
}

function slotText({ model, ranks }) {
  if (!ranks.length) return `${model}: the coordinator`;
  const who = ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${ranks.join(", ")}; ${ranks[0]} leads`;
  return `${model}: ${who}`;
}
