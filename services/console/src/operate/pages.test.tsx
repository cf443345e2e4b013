// @vitest-environment jsdom
import { act } from "react";
import { createRoot, type Root } from "react-dom/client";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import Operate from "./Operate";
import { PLACES } from "./places";
import { button, press, until } from "../testing";

// a canvas is the browser's: what is drawn is looked at there
vi.mock("./Plot", () => ({ default: () => null }));

// a machine that has much else to do is not a fault
vi.setConfig({ testTimeout: 60_000 });

const HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=2</script>';
const engram = { id: "1-0:A", response_id: "1-0:A", query_id: "1-0", session_id: "s", kind: "turn", respondent_id: "A", time: 1, age_seconds: 5, query: HOSTILE, answer: HOSTILE, content: null, topic: null, intent: null, entities: [], tainted: false, score: 4, winner: "A", pairwise_winner: true, pairwise_verdict: "A", reward: 1, sentiment: "positive" };
const trial = { decision: "not yet", verdicts: 0, wins: 0, ties: 0, losses: 0, conversations: 0, share: null, low: 0, high: 1, p_value: 1, decided_at: null, more: 9 };
const experiment = { name: "shorter", state: "running", started: 1, ended: null, a: { model: "m", prompt: HOSTILE, temperature: null }, b: { model: HOSTILE, prompt: "p", temperature: 1 }, changed: ["prompt"], result: trial, intents: { question: trial }, votes: { a: { positive: 1, negative: 0 }, promoted: null }, warnings: [HOSTILE] };
const board = { rows: [{ name: HOSTILE, config: null, strength: 1, low: 0, high: 2, win_rate: 0.7, win_rate_low: 0.5, win_rate_high: 0.9, comparisons: 3, wins: 2, ties: 0, losses: 1, group: 1 }], comparisons: 3, bias: 0.1, bias_low: 0, bias_high: 0.2, disagreement: 0.1, groups: 1, clusters: 2, resampled: "session", note: null };
const measured = { cases: 3, value: 0.5, low: 0.1, high: 0.9 };
const fact = { id: "f", subject: { id: "a", name: HOSTILE, kind: "thing" }, relation: "is", object: { id: "b", name: "b", kind: "thing" }, state: "is", since: null, until: null, said: "", time: 1, confidence: 1, text: HOSTILE, why: [HOSTILE], sources: [] };
const settings = { participant: "critic", schema: { properties: { model: { type: "string", default: "m", description: "The judge" }, attempts: { type: "integer", minimum: 1, maximum: 10, default: 3 }, rubrics: { type: "object", additionalProperties: { type: "string", enum: ["style"], enumDescriptions: [`[${HOSTILE}?]\nScore 1: ${HOSTILE}`] } } } }, values: { model: HOSTILE, attempts: 3, rubrics: { web_search: "style" } }, kept: ["model"] };
const verdict = { id: "grade:1-0:A", kind: "grade", time: 3, query_id: "1-0", session_id: "s", user_id: "ann", query: HOSTILE, respondent: "A", score: 4, winner: null, score_a: null, score_b: null, rubric: "style", words: HOSTILE, judges: [{ model: HOSTILE, score: 4, winner: null, words: HOSTILE }], answers: { A: { answer: HOSTILE, model: HOSTILE } } };
const comparison = { ...verdict, id: "comparison:1-0", kind: "comparison", time: 4, respondent: null, score: null, winner: "B", score_a: 3, score_b: 5, rubric: null, answers: { ...verdict.answers, B: { answer: "Berlin.", model: "other" } } };
const entries = [
  { subject: "query.received", entry_id: "1-0", time: "1", source: "gateway/g", payload: { query: HOSTILE } },
  { subject: "response.generation", entry_id: "2-0", time: "2", source: "generator/g", payload: { query_id: "1-0", respondent_id: "A", query: HOSTILE, answer: HOSTILE } },
  { subject: "critique.result", entry_id: "3-0", time: "3", source: "critic/c", payload: { query_id: "1-0", respondent_id: "A", score: 4, feedback: HOSTILE, rubric: "style" } },
  { subject: "settings.update", entry_id: "4-0", time: "4", source: "gateway/g", payload: { participant: "critic", values: { model: HOSTILE } } },
];

const ANSWERS: Record<string, unknown> = {
  participants: { participants: [{ name: "critic", replicas: [{ replica: "r1", state: "ready", in_flight: 1, concurrency: 2, handled: 3, release: 2, started: 1, age_ms: 5, facts: { degraded: HOSTILE } }], work: [{ subject: "x", backlog: 4, pending: 0 }] }, { name: "memory", replicas: [] }] },
  "participants/critic/settings": settings,
  ready: { status: "not ready", parts: { model: { ok: false, reason: HOSTILE } } },
  "bus/streams": { streams: [{ subject: "query.received", length: 3, oldest_seconds: 1, groups: [{ name: "generator", consumers: 1, lag: 2, pending: 1 }] }] },
  "dead-letters": { dead_letters: [{ id: "7-0", time: 1, stream: "x", group: "g", entry_id: "1-0", deliveries: 5, reason: HOSTILE, fields: { a: HOSTILE } }], total: 1, next: null },
  keys: { keys: [{ id: "k", name: HOSTILE, user_id: "ann", role: "user", created: 1, trusted: false }] },
  "memory/engrams": { engrams: [engram], cursor: null, total: 1 },
  "memory/engrams/1-0%3AA": { ...engram, model: "m", annotations: { critique: { critique: HOSTILE } } },
  "knowledge/facts": { facts: [fact], cursor: null, total: 1 },
  "knowledge/graph": { nodes: [fact.subject, fact.object], edges: [{ id: "f", from: "a", to: "b", relation: HOSTILE, state: "is", since: null, until: null, confidence: 1 }] },
  "preferences/verdicts": { verdicts: [comparison, verdict], cursor: "3 grade:1-0:A" },
  "preferences/leaderboard": { judge: board, people: { ...board, rows: [] }, agreement: { cases: 3, share: 0.5, kappa: 0.1 }, intents: {} },
  "preferences/judge": { judge: "j", agreement: measured, disagreement: measured, first_wins: measured, length: measured, own_model: { cases: 0, value: null, low: null, high: null }, unread: measured, warnings: [HOSTILE], judges: [] },
  "preferences/export/counts": { dpo: { rows: 0, more: false, why: `no rows: ${HOSTILE}` }, kto: { rows: 1, more: false, why: null }, critiques: { rows: 1003, more: true, why: null } },
  "preferences/consent": { user_id: "a", consent: null },
  experiments: { experiments: [experiment] },
  retention: { days: null, kinds: [{ kind: "sessions", participant: "gateway", setting: "keep_days_sessions", keep_days: 0, kept: 9, oldest: 1, due: 4 }], away: [{ participant: "memory", reason: HOSTILE }] },
  "experiments/shorter": experiment,
};

// One after the other, the last one again and again.
const SCRAPES = [
  "local2_bus_up 1\nlocal2_dead_letters 2\nlocal2_redis_memory_used_bytes 9e+06\nlocal2_http_requests_total{status=\"200\"} 3\n",
  "local2_bus_up 0\nlocal2_redis_memory_used_bytes 2.5e+06\nlocal2_http_requests_total{status=\"200\"} 5\n",
];

let root: Root;
let scraped: number;
let room: HTMLElement;
let sent: { method: string; path: string; body: unknown }[];
let refusal: string | null;

beforeEach(() => {
  (globalThis as { IS_REACT_ACT_ENVIRONMENT?: boolean }).IS_REACT_ACT_ENVIRONMENT = true;
  sent = [];
  refusal = null;
  scraped = 0;
  vi.stubGlobal("fetch", (path: string, { method = "GET", body }: RequestInit = {}) => {
    const name = path.split("?")[0]!;
    if (method !== "GET") {
      sent.push({ method, path, body: typeof body === "string" ? JSON.parse(body) : undefined });
      if (refusal) return Promise.resolve(Response.json({ error: { code: "invalid_setting", message: refusal } }, { status: 422 }));
    }
    if (name === "bus/events") {
      const text = entries.map((entry) => `id: ${entry.entry_id}\nevent: ${entry.subject}\ndata: ${JSON.stringify(entry)}\n\n`).join("");
      // it stays open, as the bus does
      return Promise.resolve(new Response(new ReadableStream({ start: (out) => out.enqueue(new TextEncoder().encode(text)) })));
    }
    if (name === "metrics") return Promise.resolve(new Response(SCRAPES[Math.min(scraped++, SCRAPES.length - 1)]));
    return Promise.resolve(Response.json(ANSWERS[name] ?? {}));
  });
  room = document.body.appendChild(document.createElement("div"));
  root = createRoot(room);
});

afterEach(async () => {
  await act(async () => root.unmount());
  room.remove();
  vi.unstubAllGlobals();
});

const show = (page: string, onPage = () => {}) => act(async () => root.render(<Operate page={page} onPage={onPage} />));
const type = (element: HTMLInputElement, words: string) => act(async () => {
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value")!.set!.call(element, words);
  element.dispatchEvent(new Event("input", { bubbles: true }));
});

test.each([...Object.keys(PLACES).filter((place) => place !== "metrics"), "participants/critic", "participants/critic/settings", "bus/1-0", "experiments/shorter"])("%s shows what the API says as text, whatever it is", async (page) => {
  await show(page);
  const values = () => [...document.querySelectorAll("input")].map((one) => one.value).join();
  if (page !== "participants") await until(() => (document.body.textContent + values()).includes("onerror"));
  else await until(() => document.body.textContent?.includes("no live replica"));
  for (const opener of document.querySelectorAll<HTMLElement>("[aria-expanded=false]")) await press(opener);
  await until(() => true);
  expect(room.querySelector("img, script")).toBeNull();
  expect((window as { hit?: number }).hit).toBeUndefined();
});

test("what a number of days removes is asked before it is set", async () => {
  await show("retention");
  await until(() => document.querySelector("#keep-sessions"));
  await type(document.querySelector<HTMLInputElement>("#keep-sessions")!, "30");
  await press(button("Set"));
  await until(() => document.querySelector("[role=dialog]")?.textContent?.includes("4 of 9 are older"));
  expect(sent).toEqual([]);
  await press(button("Keep them so long"));
  await until(() => sent.length);
  expect(sent[0]).toEqual({ method: "PATCH", path: "participants/gateway/settings", body: { keep_days_sessions: 30 } });
});

test("metrics show the newest value of each series, and keep them on other pages", async () => {
  vi.useFakeTimers({ shouldAdvanceTime: true });
  try {
    await show("metrics");
    const says = (what: RegExp) => [...document.querySelectorAll(".plot")].some((one) => what.test(one.textContent ?? ""));
    await until(() => says(/Dead letters\s*2/));
    expect(says(/Requests\s*–/)).toBe(true);
    await show("bus");
    await act(() => vi.advanceTimersByTimeAsync(15_000));
    await until(() => scraped === 2);
    await show("metrics");
    await until(() => says(/Redis' memory\s*2.5 MB/));
    expect(says(/Requests\s*(8|7\.\d+) a minute/)).toBe(true);
    // The newest known value is not of this moment: the bus was away then.
    expect(says(/Dead letters\s*2\s+at /)).toBe(true);
    expect(says(/2.5 MB at/)).toBe(false);
  } finally {
    vi.useRealTimers();
  }
});

test("a head sorts its column, in both directions, and a field filters", async () => {
  await show("bus");
  await until(() => document.querySelector("#streams"));
  await show("participants");
  await until(() => document.querySelector("#participants-table"));
  const names = () => [...document.querySelectorAll("#participants-table tbody th")].map((one) => one.textContent);
  expect(names()).toEqual(["critic", "memory"]);
  const head = document.querySelector<HTMLElement>("#participants-table thead button")!;
  await press(head);
  await press(head);
  expect(names()).toEqual(["memory", "critic"]);
  expect(head.closest("th")?.getAttribute("aria-sort")).toBe("descending");
  await type(document.querySelector<HTMLInputElement>("main input[type=search]")!, "mem");
  expect(names()).toEqual(["memory"]);
});

test("what a replica holds beyond its places is told apart from what it works at", async () => {
  const known = ANSWERS["participants"];
  ANSWERS["participants"] = { participants: [{ name: "web_fetch", replicas: [{ replica: "r1", state: "ready", in_flight: 6, concurrency: 5 }, { replica: "r2", state: "ready", in_flight: 1, concurrency: 5 }], work: [] }] };
  await show("participants");
  await until(() => document.querySelector(".load"));
  expect(document.querySelector(".load")!.textContent).toBe(" 6/10 +1");
  ANSWERS["participants"] = known;
});

test("settings send only what is different, and show a refusal at its field", async () => {
  await show("participants/critic/settings");
  await until(() => document.querySelector("#setting-attempts") && document.body.textContent?.includes("Changed lately (1)"));
  const field = () => document.querySelector<HTMLInputElement>("#setting-attempts")!;
  await type(field(), "99");
  await press(button("Keep"));
  expect(sent).toEqual([]);
  expect(field().getAttribute("aria-invalid")).toBe("true");
  await type(field(), "5");
  refusal = "attempts: 5 is too many today";
  await press(button("Keep"));
  await until(() => document.querySelector("#setting-attempts-wrong"));
  expect(document.querySelector("#setting-attempts-wrong")?.textContent).toBe(refusal);
  expect(sent).toEqual([{ method: "PATCH", path: "participants/critic/settings", body: { attempts: 5 } }]);
  refusal = null;
  sent = [];
  await press(button("Reset model to its default"));
  await until(() => sent.length);
  expect(sent[0]?.body).toEqual({ model: "m" });
});

test("a dead letter is replayed at once and dropped after a question", async () => {
  await show("dead-letters");
  await until(() => button("Replay 7-0"));
  await press(button("Drop 7-0"));
  expect(sent).toEqual([]);
  await until(() => button("Drop it"));
  await press(button("Drop it"));
  await until(() => document.body.textContent?.includes("There are none"));
  expect(sent).toEqual([{ method: "DELETE", path: "dead-letters/7-0", body: undefined }]);
});

test("a verdict shows both answers and the wording that the judge had; older ones come when asked for", async () => {
  await show("critic");
  await until(() => document.querySelectorAll("[aria-expanded=false]").length === 2 && document.querySelector(".rubrics ol"));
  expect(document.querySelector(".rubrics")?.textContent).toContain("answers with web_search");
  await press(document.querySelector<HTMLElement>("[aria-expanded=false]")!);
  const cards = [...document.querySelectorAll(".detail .card")].map((one) => one.textContent);
  expect(cards[1]).toMatch(/^B · other 5\/5 better.*Berlin\./);
  ANSWERS["preferences/verdicts"] = { verdicts: [{ ...verdict, id: "grade:0-1:A", time: 1, query: "an older one" }, verdict], cursor: null };
  await press(button("Older ones"));
  await until(() => document.body.textContent?.includes("an older one"));
  expect(document.querySelectorAll("tbody th")).toHaveLength(3);
  expect(button("Older ones")).toBeUndefined();
});

test("what is on its way is not called empty", async () => {
  vi.stubGlobal("fetch", () => new Promise(() => {}));
  for (const page of Object.keys(PLACES)) {
    await show(page);
    await until(() => document.querySelector("main")?.textContent?.includes("Loading …"));
  }
});

test("changes of state are shown to whoever asks for them, and a message leads to its like", async () => {
  entries.push({ subject: "agent.transition", entry_id: "5-0", time: "5", source: "critic/c", payload: { query_id: "1-0", from: "IDLE", action: "ASK", to: "BUSY" } as never });
  await show("bus");
  const shown = () => [...document.querySelectorAll("#bus-events > li")].map((one) => one.textContent);
  await until(() => shown().length === 4);
  expect(shown().join()).not.toContain("BUSY");
  await press(document.querySelector<HTMLElement>(".filters input[type=checkbox]")!);
  await until(() => shown().length === 5);
  await act(async () => document.querySelectorAll<HTMLDetailsElement>("#bus-events details")[2]!.setAttribute("open", ""));
  await until(() => button("Only this question"));
  await press(button("Only this question"));
  expect(shown()).toHaveLength(4);
  entries.pop();
});

test.each(["experiments", "ranking", "critic"].flatMap((page) => [true, false].map((runs) => [page, runs] as const)))("%s asks for a respondent B only where none runs (runs: %s)", async (page, runs) => {
  const none: Record<string, unknown> = {
    participants: { participants: [{ name: "respondent-b", replicas: runs ? [{ replica: "r1", state: "ready" }] : [], work: [] }] },
    experiments: { experiments: [] },
    "preferences/leaderboard": { judge: { ...board, rows: [] }, people: { ...board, rows: [] }, agreement: { cases: 0, share: null, kappa: null }, intents: {} },
    "preferences/verdicts": { verdicts: [], cursor: null },
  };
  const known = { ...ANSWERS };
  Object.assign(ANSWERS, none);
  const { fetch } = globalThis;
  let answered = false;
  vi.stubGlobal("fetch", async (path: string, init?: RequestInit) => {
    const answer = await fetch(path, init);
    answered ||= path.startsWith("participants");
    return answer;
  });
  try {
    await show(page);
    await until(() => answered && /There has been none yet|Nothing has been compared yet|No verdict has come yet/.test(document.body.textContent!));
    // the page has rendered the answer after one more look
    await until(() => true);
    expect(document.body.textContent!.includes("--respondent-b")).toBe(!runs);
  } finally {
    Object.assign(ANSWERS, known);
  }
});

test("a page that is not for this key says so", async () => {
  vi.stubGlobal("fetch", () => Promise.resolve(Response.json({ error: { code: "forbidden", message: "no" } }, { status: 403 })));
  await show("keys");
  await until(() => document.body.textContent?.includes("This is shown to administrators."));
});

test("an export says how many rows it has before it is asked for, and why none", async () => {
  await show("ranking");
  const words = (start: string) => [...document.querySelectorAll("button")].find((one) => one.textContent!.startsWith(start))!;
  await until(() => words("Pairs (DPO): 0 rows"));
  expect(words("Pairs").disabled).toBe(true);
  expect(document.body.textContent).toContain(`Pairs (DPO): no rows: ${HOSTILE}`);
  expect([words("Single").textContent, words("Grades").textContent]).toEqual(["Single answers (KTO): 1 row", "Grades with their words: 1,003 rows or more"]);
  expect(words("Single").disabled || words("Grades").disabled).toBe(false);
});
