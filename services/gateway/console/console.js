// The page: puts its parts together and listens to the keyboard.

import { call, forgetKey, keepKey, loadKey, readiness, redeemLink } from "./api.js";
import { BusPanel } from "./bus_panel.js";
import { Conversation } from "./conversation.js";
import { sleep } from "./events.js";
import { MemoryPanel } from "./memory_panel.js";
import { RankingPanel } from "./ranking_panel.js";
import { SessionList } from "./session_list.js";

const READINESS_INTERVAL = 10_000;
const byId = (id) => document.getElementById(id);

const question = byId("question");
const keyDialog = byId("key-dialog");
const drawers = [
  { panel: byId("sessions"), toggle: byId("toggle-sessions") },
  { panel: byId("memory"), toggle: byId("toggle-memory"), view: new MemoryPanel(byId("memory")) },
  { panel: byId("ranking"), toggle: byId("toggle-ranking"), view: new RankingPanel(byId("ranking")) },
  { panel: byId("bus"), toggle: byId("toggle-bus"), view: new BusPanel(byId("bus")) },
];
const conversation = new Conversation(byId("conversation"), byId("empty"), {
  onChange: showState,
  onAccepted: () => sessions.refresh().catch(report),
  onConnection: (text) => { byId("connection").textContent = text; },
});
const sessions = new SessionList(byId("session-list"), byId("more-sessions"), {
  onOpen: openSession,
  onDeleted: (id) => { if (id === conversation.sessionId) openSession(null); },
  onError: report,
});

// ── the key ──────────────────────────────────────────────────────────────────────────────────────────────────

function report(error) {
  if (error.status === 401) return askForKey("This key is not valid.");
  byId("alert").textContent = error.message;
  byId("alert").hidden = false;
}

function askForKey(reason = "") {
  byId("key-error").textContent = reason;
  byId("key-error").hidden = !reason;
  if (!keyDialog.open) keyDialog.showModal();
  byId("key").focus();
}

byId("change-key").addEventListener("click", () => askForKey());
byId("forget").addEventListener("click", () => {
  forgetKey();
  keyDialog.close();
  start();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const value = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(value)) return askForKey("A key has no spaces or special letters.");
  keepKey(value, byId("remember").checked);
  byId("key").value = "";
  keyDialog.close();
  start();
});

// ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────

const addressed = () => new URLSearchParams(location.hash.slice(1)).get("session");

async function openSession(id) {
  closeDrawer(drawers[0]);
  byId("alert").hidden = true;
  sessions.mark(id);
  try {
    await conversation.open(id);
  } catch (error) {
    if (error.status === 404) return openSession(null);
    report(error);
  }
  question.focus({ preventScroll: true });
}

function showState() {
  const running = conversation.running !== null;
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  const id = conversation.sessionId;
  if (addressed() !== id) history.replaceState(null, "", id ? `#session=${encodeURIComponent(id)}` : location.pathname);
  if (sessions.current !== id) sessions.mark(id);
}

byId("new-session").addEventListener("click", () => openSession(null));

// ── asking and stopping ──────────────────────────────────────────────────────────────────────────────────────

async function send() {
  const text = question.value;
  if (!text.trim() || conversation.running) return;
  byId("alert").hidden = true;
  question.value = "";
  fitQuestion();
  try {
    await conversation.ask(text, byId("mode").value);
  } catch (error) {
    byId("connection").textContent = "";
    if (!question.value) question.value = text;
    fitQuestion();
    report(error);
  }
}

async function stop() {
  byId("stop").disabled = true;
  try {
    await conversation.cancel();
  } catch (error) {
    report(error);
  } finally {
    byId("stop").disabled = false;
  }
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight + 2, 240)}px`;
}

byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("stop").addEventListener("click", stop);
question.addEventListener("input", fitQuestion);
question.addEventListener("keydown", (event) => {
  // Enter that ends the choice of a character in an input method is not for us
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || keyDialog.open || event.isComposing) return;
  const open = drawers.find(({ panel, toggle }) => isDrawer(panel) && toggle.ariaExpanded === "true");
  if (open) closeDrawer(open, true);
  else if (conversation.running) stop();
});
byId("skip").addEventListener("click", (event) => { event.preventDefault(); question.focus(); });

// ── panels at the sides ──────────────────────────────────────────────────────────────────────────────────────

// On a narrow page they lie over the conversation.
const isDrawer = (panel) => getComputedStyle(panel).position === "absolute";

function closeDrawer(drawer, focus = false) {
  if (!isDrawer(drawer.panel)) return;
  setDrawer(drawer, false);
  if (focus) drawer.toggle.focus();
}

function setDrawer({ panel, toggle, view }, open) {
  toggle.ariaExpanded = String(open);
  panel.classList.toggle("open", open);
  if (!view) return;
  panel.hidden = !open;
  if (open) view.open();
  else view.close();
}

for (const drawer of drawers) {
  drawer.toggle.addEventListener("click", () => {
    const open = drawer.toggle.ariaExpanded !== "true";
    for (const other of drawers) {
      if (!open || other === drawer) continue;
      // there is room for one panel on the right
      if (drawer.view && other.view) setDrawer(other, false);
      else closeDrawer(other);
    }
    setDrawer(drawer, open);
  });
}

// ── readiness ────────────────────────────────────────────────────────────────────────────────────────────────

async function watchReadiness() {
  for (;;) {
    if (!document.hidden) showReadiness(await readiness());
    await sleep(READINESS_INTERVAL);
  }
}

function showReadiness({ status, parts }) {
  const troubles = Object.entries(parts).filter(([, part]) => !part.ok).map(([name, part]) => `${name}: ${part.reason}`);
  const { model } = parts;
  const shown = byId("readiness");
  shown.className = status === "ready" ? "ready" : "not-ready";
  const text = status === "ready" ? `ready · ${model.model}` : troubles.join("; ") || status;
  if (shown.textContent !== text) shown.textContent = text;
  shown.title = status === "ready" ? text + described(model.facts) : text;
  const demo = model?.demo ? `Demo model ${model.model}: ${model.note ?? "it is not a good model"}` : "";
  byId("demo").hidden = !demo;
  if (byId("demo").textContent !== demo) byId("demo").textContent = demo;
}

/** What the server has said of the model, in brackets. */
function described(facts) {
  if (!facts) return "";
  const parts = [
    facts.server,
    facts.window && `window ${facts.window.toLocaleString("en")} tokens`,
    facts.slots && `${facts.slots} at a time`,
    facts.abilities && `can: ${facts.abilities.join(", ")}`,
  ].filter(Boolean);
  return parts.length ? ` (${parts.join("; ")})` : "";
}

// ── start ────────────────────────────────────────────────────────────────────────────────────────────────────

async function start() {
  byId("alert").hidden = true;
  let link = "";
  try {
    await redeemLink();
  } catch (error) {
    link = `${error.message}. "local2 keys link" prints another one.`;
  }
  try {
    await sessions.refresh();
  } catch (error) {
    if (error.status === 401) return askForKey(link || (loadKey() ? "This key is not valid." : ""));
    report(error);
    if (error.temporary) setTimeout(start, 2_000);
    return;
  }
  keyDialog.close();
  for (const { panel, view } of drawers) if (view && !panel.hidden) view.open();
  await openSession(addressed());
}

window.addEventListener("hashchange", () => {
  if (location.hash.includes("once=")) {
    start();
  } else if (addressed() !== conversation.sessionId) {
    openSession(addressed());
  }
});

loadKey();
watchReadiness();
start();
