// @vitest-environment jsdom
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import type { QueryListed, TurnShown } from "../api/types";
import { Conversation } from "./conversation";
import { answerOf, modelOf, stepsOf } from "./turn";

const turn = (n: number): TurnShown => ({ query_id: `${n}-0`, after: null, query: `q${n}`, answer: `a${n}`, time: n, interrupted: false, attachments: [] });
const failed = (n: number): QueryListed => ({ query_id: `${n}-0`, session_id: "s", state: "failed", query: `f${n}`, mode: "chat", accepted: n, after: null, error: { code: "model_missing", message: "no model" } });
const info = { session_id: "s", title: "t", created: 1, updated: 1, pinned: false, settings: {}, tip: "9-0", total: 4, messages: [] };

let answers: Record<string, unknown>;
let asked: string[];
let conversation: Conversation;

beforeEach(() => {
  asked = [];
  answers = {
    "queries?session_id=s&limit=200": { queries: [failed(2), failed(8)] },
    "sessions/s?messages=false&limit=50": { ...info, turns: [turn(7), turn(9)], earlier: "7-0" },
    "sessions/s?messages=false&limit=50&before=7-0": { ...info, turns: [turn(1), turn(3)], earlier: null },
  };
  vi.stubGlobal("fetch", (path: string) => {
    asked.push(path);
    const found = answers[path];
    return Promise.resolve(found === undefined ? Response.json({ error: { code: "not_found", message: "There is no such turn." } }, { status: 404 }) : Response.json(found));
  });
  conversation = new Conversation({ onChange: () => {}, onError: () => {} });
});

afterEach(() => {
  conversation.close();
  vi.unstubAllGlobals();
});

const ids = () => conversation.turns.map(({ turn: { queryId } }) => queryId);
const settled = (fact: () => boolean) => vi.waitUntil(fact, { timeout: 20_000 });

it("questions without an answer stand on the page of the turns around them", async () => {
  await conversation.show("s");
  expect(ids()).toEqual(["7-0", "8-0", "9-0"]);
  await conversation.showEarlier();
  expect(ids()).toEqual(["1-0", "2-0", "3-0", "7-0", "8-0", "9-0"]);
  expect(conversation.turns[1]!.turn).toMatchObject({ state: "failed", query: "f2", error: { message: "no model" } });
  expect(await conversation.showEarlier()).toBe(false);
});

it("a turn that is looked at is told by its session, with all that was thought of it, in one request", async () => {
  answers["sessions/s/turns/9-0"] = { query_id: "9-0", session_id: "s", open_to_votes: true, event_log: [], journal: [
    { id: "1-0", event: "claimed", data: { model: "m", attachments: [{ id: "f", name: "notes.txt" }] } },
    { id: "1-1", event: "thinking", data: { text: "Hm." } },
    { id: "1-2", event: "completed", data: { answer: "a9", model: "m", finish_reason: "stop", usage: { prompt_tokens: 3, completion_tokens: 4 } } },
    { id: "5-0", event: "critique", data: { score: 4, feedback: "Good.", rubric: "r" } },
    { id: "5-1", event: "reward", data: { reward: 1, sentiment: "positive", thumb: null, stars: 5, comment: null } },
  ] };
  await conversation.show("s");
  const store = conversation.turns[2]!;
  const before = asked.length;
  conversation.detail(store);
  await settled(() => store.turn.detail === "whole");
  expect(asked.slice(before)).toEqual(["sessions/s/turns/9-0"]);
  expect(stepsOf(store.turn).map((part) => part.kind)).toEqual(["thinking"]);
  expect([answerOf(store.turn), modelOf(store.turn), store.turn.critique?.score, store.turn.reward?.stars, store.turn.rateable]).toEqual(["a9", "m", 4, 5, true]);
  expect(await conversation.filesOf(store.turn)).toMatchObject([{ id: "f", name: "notes.txt" }]);
});

it("of an answer of which nothing is kept no more is shown than is known, and that it is so", async () => {
  answers["sessions/s/turns/9-0"] = { query_id: "9-0", session_id: "s", open_to_votes: false, event_log: [], journal: [{ id: "5-0", event: "critique", data: { score: 2, feedback: "", rubric: "r" } }] };
  await conversation.show("s");
  const [first, , last] = conversation.turns as [typeof conversation.turns[0], unknown, typeof conversation.turns[0]];
  conversation.detail(last!);
  conversation.detail(first!);
  await settled(() => first!.turn.detail === "expired" && last!.turn.detail === "expired");
  expect([answerOf(last!.turn), last!.turn.state, last!.turn.critique?.score, last!.turn.rateable]).toEqual(["a9", "completed", 2, false]);
  expect([answerOf(first!.turn), first!.turn.state]).toEqual(["a7", "completed"]);
});

it.each([
  ["Australia/Sydney", ["Australia/Sydney"]],
  ["Mars/Olympus_Mons", ["Mars/Olympus_Mons", null]],
])("a question has the browser's time zone, unless the server does not know it: %s", async (zone, sent) => {
  const bodies: string[] = [];
  vi.stubGlobal("fetch", (path: string, { body }: RequestInit = {}) => {
    if (path.startsWith("query?")) bodies.push(String(body));
    if (String(body).includes("Mars")) return Promise.resolve(Response.json({ error: { code: "invalid_request", message: "time_zone: unknown time zone" } }, { status: 422 }));
    return Promise.resolve(Response.json(path.startsWith("query?") ? { query_id: "1-0", session_id: "s" } : { queries: [], ...info, turns: [], earlier: null }));
  });
  const format = vi.spyOn(Intl.DateTimeFormat.prototype, "resolvedOptions").mockReturnValue({ timeZone: zone } as Intl.ResolvedDateTimeFormatOptions);
  await conversation.ask({ query: "What day is it?" });
  format.mockRestore();
  expect(bodies.map((body) => (JSON.parse(body) as { time_zone: string | null }).time_zone)).toEqual(sent);
});

it("an edited question from which the last file was removed is sent with an empty list of files", async () => {
  await conversation.show("s");
  const bodies: { instead_of?: string; attachments?: string[] }[] = [];
  vi.stubGlobal("fetch", (path: string, { body }: RequestInit = {}) => {
    if (path.startsWith("query?")) bodies.push(JSON.parse(String(body)) as typeof bodies[0]);
    return Promise.resolve(Response.json(path.startsWith("query?") ? { query_id: "10-0", session_id: "s" } : { queries: [], ...info, turns: [], earlier: null }));
  });
  const { turn: edited } = conversation.turns.at(-1)!;
  await conversation.ask({ query: "without the file", files: [] }, edited);
  await conversation.ask({ query: "a new question" });
  expect(bodies.map(({ instead_of, attachments }) => [instead_of, attachments])).toEqual([[edited.queryId, []], [undefined, undefined]]);
});
