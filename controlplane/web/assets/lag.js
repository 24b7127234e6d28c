// How far behind what is served is: the tokens made, by their version's lag then; before there are any, the engines.

import { byId, keyed, make, row, say } from "./dom.js";
import { count } from "./words.js";

export function showLag(fleet) {
  const sums = fleet.token_lags.map((of) => ({ model: of.model, bins: of.tokens_by_lag.map(Number) }));
  const tokens = sums.filter(({ bins }) => total(bins));
  const shown = tokens.length ? tokens : [{ model: "", bins: ofEngines(fleet.engines) }];
  const all = shown.reduce((sum, { bins }) => sum + total(bins), 0);
  const what = tokens.length ? "tokens that engines made" : "engines that hold a version";
  say(byId("lag-of"), all ? `${count(all)} ${what}, by fleet commits behind the newest` : "nothing was made yet");
  const items = shown.flatMap((of) => itemsOf(of, tokens.length > 1, tokens.length > 0));
  keyed(byId("lag-rows"), items, (item) => item.lag, newRow, fill);
}

/** Of one model; its name goes before the lag where there are several. */
function itemsOf({ model, bins }, named, open) {
  const all = total(bins);
  const last = bins.length - 1;
  const head = (i) => `${named ? `${model} ` : ""}${i}${i === last && open ? "+" : ""}`;
  return trimmed(bins).map((value, i) => ({ lag: head(i), value, all }));
}

const total = (bins) => bins.reduce((a, b) => a + b, 0);

function newRow() {
  const made = row(3, ["number", "share", "number"]);
  made.children[1].append(make("i", "fill"));
  return made;
}

function fill(element, { lag, value, all }) {
  const [head, share, number] = element.children;
  say(head, lag);
  share.firstElementChild.hidden = !value;
  share.firstElementChild.style.width = `${((value / (all || 1)) * 100).toFixed(2)}%`;
  say(number, `${count(value)}  ${shareOf(value, all)}`);
}

function shareOf(value, all) {
  const part = (value / (all || 1)) * 100;
  if (value && part < 0.05) return "< 0.1 %";
  return `${part >= 9.95 || !value ? part.toFixed(0) : part.toFixed(1)} %`;
}

function ofEngines(engines) {
  const bins = [];
  for (const engine of engines) {
    if (engine.known && engine.lag !== undefined && engine.lag !== null) {
      bins[Number(engine.lag)] = (bins[Number(engine.lag)] ?? 0) + 1;
    }
  }
  return Array.from(bins, (value) => value ?? 0);
}

/** Without the empty bins at the end, but for one. */
function trimmed(bins) {
  const last = bins.findLastIndex((value) => value > 0);
  return bins.slice(0, Math.min(bins.length, Math.max(last + 2, Math.min(4, bins.length))));
}
