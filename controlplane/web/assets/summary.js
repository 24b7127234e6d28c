// The head, the banner and the few figures that sum the fleet up.

import { byId, keyed, make, mark, say } from "./dom.js";
import { age, millis, span, state, version, word } from "./words.js";

export function showSummary(fleet, now) {
  say(byId("run"), `run ${fleet.run_id} · coordinator term ${fleet.coordinator_term}`);
  showBanner(fleet);
  keyed(byId("summary"), figures(fleet, now), (f) => f.label, figure, fillFigure);
}

function showBanner(fleet) {
  const banner = byId("banner");
  let text = "";
  if (fleet.ledger_regressed) text = `The ledger is an older copy; nothing is given out: ${fleet.ledger_regressed}`;
  else if (fleet.recovering) {
    text = "The coordinator was restarted and waits for its engines' reports; no update begins until then.";
    if (fleet.awaited_engine_ids.length) text += ` Not heard yet: ${some(fleet.awaited_engine_ids)}.`;
  }
  say(banner, text);
  banner.hidden = !text;
  mark(banner, "data-grave", fleet.ledger_regressed ? "yes" : "");
}

const some = (names) => names.slice(0, 8).join(", ") + (names.length > 8 ? ` and ${names.length - 8} more` : "");

function figures(fleet, now) {
  const engines = fleet.engines;
  const serving = engines.filter((e) => state(e) === "serving").length;
  const known = engines.filter((e) => e.known).length;
  const lags = engines.filter((e) => e.lag !== undefined && e.lag !== null).map((e) => Number(e.lag));
  return [
    ...fleet.state.models.map((model) => servedFigure(model)),
    {
      label: "Engines serving",
      value: `${serving} of ${engines.length}`,
      note: known < engines.length ? `${engines.length - known} unknown` : "all are heard",
      look: serving < engines.length,
    },
    { label: "Largest lag", value: lags.length ? String(Math.max(...lags)) : "–", note: "fleet commits" },
    updateFigure(fleet, now),
    ...fleet.trainers.map((trainer) => trainerFigure(trainer, now)),
  ];
}

function servedFigure(model) {
  const served = model.served.map(version).join(" and ") || "nothing yet";
  const note = model.frozen ? "frozen as loaded" : `ordinal ${model.ordinal}, term ${model.term}`;
  return { label: `${model.model} serves`, value: served, note };
}

function updateFigure(fleet, now) {
  const open = fleet.updates.find((u) => !u.decide_time && ["UPDATE_PHASE_PREPARING", "UPDATE_PHASE_GO"].includes(u.phase));
  if (open) {
    const since = millis(open.begin_time);
    const note = since === null ? "" : `for ${span((now - since) / 1000)}`;
    return { label: "Update", value: `${version(open.version)} ${word(open.phase, "UPDATE_PHASE_")}`, note, busy: true };
  }
  const last = fleet.updates[0];
  if (!last) return { label: "Update", value: "none", note: "since the coordinator's start" };
  const took = last.begin_time ? span((millis(last.decide_time) - millis(last.begin_time)) / 1000) : "";
  const phase = word(last.phase, "UPDATE_PHASE_");
  return {
    label: "Last update",
    value: `${version(last.version)} ${phase}`,
    note: took ? `in ${took}` : "",
    look: phase !== "committed",
  };
}

function trainerFigure(trainer, now) {
  const left = (millis(trainer.lease_expire_time) - now) / 1000;
  const lease = left > 0 || trainer.left ? "" : `; lease expired ${age(-left)} ago`;
  const step = trainer.status.step === undefined ? "" : `step ${trainer.status.step} `;
  const [lost] = trainer.connected ? trainer.status.lost_ranks || [] : [];
  const doing = lost ? `lost rank ${lost.rank}` : trainer.status.phase || "joined";
  return {
    label: trainer.trainer_id,
    value: trainer.connected ? `${step}${doing}` : trainer.left ? "left" : "not connected",
    note: `${trainer.rank_count ? `${trainer.rank_count} ranks, ` : ""}term ${trainer.term}${lease}`,
    look: lost !== undefined || (!trainer.connected && !trainer.left),
  };
}

function figure() {
  const made = make("div");
  made.append(make("dt"), make("dd", "value"), make("dd", "note"));
  return made;
}

function fillFigure(element, item) {
  const [label, value, note] = element.children;
  say(label, item.label);
  say(value, item.value);
  say(note, item.note);
  mark(element, "data-tone", item.look ? "look" : item.busy ? "busy" : "");
}
