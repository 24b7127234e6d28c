// How values read: the words of the contract, units, ages. Pure.

export const UNKNOWN = "unknown";
const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

/** term.number; empty where there is none. */
export const version = (v) => (v ? `${v.term}.${v.number}` : "");

export const same = (a, b) => Boolean(a && b) && a.term === b.term && a.number === b.number;

/** The last part of an enum's name, in lower case: TRANSPORT_SHARED_MEMORY, "TRANSPORT_" → shared memory. */
export const word = (name, prefix) => (name ?? "").replace(prefix, "").toLowerCase().replaceAll("_", " ");

/** Milliseconds since the epoch of a timestamp; null where there is none. */
export const millis = (stamp) => (stamp ? Date.parse(stamp) : null);

/** Seconds of a duration such as "1.250s". */
export const seconds = (duration) => (duration ? Number.parseFloat(duration) : 0);

/** Seconds, so that three digits say it. */
export function span(value) {
  if (value === null || Number.isNaN(value)) return "";
  if (value < 0.9995) return `${Math.max(0, value * 1000).toFixed(0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
  if (value < 5400) return `${(value / 60).toFixed(0)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(0)} h` : `${(value / 86400).toFixed(0)} d`;
}

/** How old something is; below two seconds that is "now". */
export function age(value) {
  if (value < 2) return "now";
  return value < 120 ? `${value.toFixed(0)} s` : span(value);
}

export function size(bytes) {
  const value = Number(bytes ?? 0);
  const unit = UNITS.find(([least]) => value >= least);
  return unit ? `${(value / unit[0]).toFixed(1)} ${unit[1]}` : `${value} B`;
}

export const count = (value) => Number(value ?? 0).toLocaleString("en");

export function clock(stamp) {
  return stamp ? new Date(stamp).toLocaleTimeString("en-GB", { hour12: false }) : "";
}

/** By runs of digits as numbers: e2 before e10. */
const collator = new Intl.Collator("en", { numeric: true });
export const naturally = (a, b) => collator.compare(a, b);

/** The engine's one word; unknown while its session is lost, whatever it said last. */
export const state = (engine) => (engine.known ? engine.status.word || UNKNOWN : UNKNOWN);

export const name = (engine) => engine.status.engine.engine_id;
