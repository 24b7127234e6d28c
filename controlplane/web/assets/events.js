// What happened lately; what somebody should look at is said aloud too.

import { byId, keyed, mark, row, say } from "./dom.js";
import { clock } from "./words.js";

const SHOWN = 60;
let announced = null;

export function showEvents(fleet) {
  const events = numbered(fleet.events).slice(0, SHOWN);
  keyed(byId("event-rows"), events, (e) => e.key, () => row(4, ["when", "", "", ""]), fill);
  announce(events);
}

/** Equal events may come twice: each has a key of its own, which stays. */
function numbered(events) {
  const seen = new Map();
  return [...events].reverse().map((event) => {
    const base = `${event.time} ${event.name} ${event.subject} ${event.text}`;
    seen.set(base, (seen.get(base) ?? 0) + 1);
    return { ...event, key: `${base} ${seen.get(base)}` };
  }).reverse();
}

function fill(element, event) {
  [clock(event.time), event.name.replaceAll("_", " "), event.subject, event.text].forEach((value, i) =>
    say(element.children[i], value));
  mark(element, "data-alarming", event.alarming ? "yes" : "");
}

function announce(events) {
  const latest = events.find((e) => e.alarming);
  const key = latest?.key ?? "";
  if (announced !== null && key && key !== announced) say(byId("announce"), `${latest.subject}: ${latest.text}`);
  announced = key;
}
