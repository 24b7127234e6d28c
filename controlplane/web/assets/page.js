// The page: takes each state of the fleet as it comes, and shows it.

import { byId, mark, say } from "./dom.js";
import { showEvents } from "./events.js";
import { showFleet } from "./fleet.js";
import { keepToken, Refused, states } from "./follow.js";
import { showLag } from "./lag.js";
import { showSummary } from "./summary.js";
import { showTopology } from "./topology.js";
import { onChoice, showUpdates } from "./updates.js";
import { age, millis } from "./words.js";

const SILENT_SECONDS = 15;
const AGAIN_MILLIS = 2000;
let fleet = null;
let heardAt = 0;

/** The coordinator's clock now: ages are counted by it, whatever this machine's clock says. */
const now = () => millis(fleet.time) + (Date.now() - heardAt);

function show() {
  if (!fleet) return;
  showSummary(fleet, now());
  showFleet(fleet, now());
  showUpdates(fleet, now());
  showTopology(fleet);
  showLag(fleet);
  showEvents(fleet);
  document.body.dataset.shown = "yes";
}

function sayLink(state, text) {
  say(byId("link"), text);
  mark(byId("link"), "data-state", state);
  mark(document.body, "data-stale", state === "live" ? "" : "yes");
}

async function follow() {
  try {
    for await (const state of states()) {
      fleet = state;
      heardAt = Date.now();
      ask("");
      sayLink("live", "live");
      show();
    }
    sayLink("lost", "lost the coordinator; this is what it said last");
  } catch (error) {
    if (error instanceof Refused) {
      sayLink("lost", "who looks must say who it is");
      return ask(error.message);
    }
    sayLink("lost", fleet ? "lost the coordinator; this is what it said last" : "the coordinator does not answer");
  }
  setTimeout(follow, AGAIN_MILLIS);
}

/** Have a token typed, with the reason; with none, no more. */
function ask(why) {
  const form = byId("ask");
  if (!why && form.hidden) return;
  say(byId("ask-why"), why);
  form.hidden = !why;
  if (why) byId("token").focus();
}

function takeToken(event) {
  event.preventDefault();
  keepToken(byId("token").value);
  byId("token").value = "";
  follow();
}

function tick() {
  if (!fleet) return;
  const silent = (Date.now() - heardAt) / 1000;
  if (silent > SILENT_SECONDS) sayLink("lost", `no word for ${age(silent)}; this is what it said last`);
  showSummary(fleet, now());
  showFleet(fleet, now());
}

function followTheme() {
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const set = (theme) => {
    mark(document.documentElement, "data-theme", theme);
    const dark = theme ? theme === "dark" : system.matches;
    mark(button, "aria-pressed", dark ? "true" : "false");
  };
  set(localStorage.getItem("theme"));
  system.addEventListener("change", () => set(localStorage.getItem("theme")));
  button.addEventListener("click", () => {
    const theme = button.getAttribute("aria-pressed") === "true" ? "light" : "dark";
    localStorage.setItem("theme", theme);
    set(theme);
  });
}

followTheme();
onChoice(show);
byId("find").addEventListener("input", show);
byId("odd").addEventListener("change", show);
byId("ask").addEventListener("submit", takeToken);
setInterval(tick, 1000);
follow();
