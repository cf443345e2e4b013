import { expect, test } from "vitest";
import { joined, type BusEntry } from "./asking";
import { beginning, fits, questionOf, spansOf, summaryOf, withLog } from "./summary";

const entry = (subject: string, payload: unknown, more: Record<string, string> = {}): BusEntry => ({ subject, payload, entry_id: "1000-0", time: "1000", ...more });

test("a message is said in a line", () => {
  expect(summaryOf(entry("query.received", { query: "What\n is it?" }))).toBe("What is it?");
  expect(summaryOf(entry("response.generation", { answer: "Paris.", thinking: "I know it.", tool_calls: [{}, {}] }))).toBe("Paris. · thought: I know it. · 2 tools");
  expect(summaryOf(entry("agent.transition", { from: "IDLE", action: "ASK", to: "BUSY" }))).toBe("IDLE → BUSY (ASK)");
  expect(summaryOf(entry("tool.result.web_search", { result: "x", duration_ms: 5, error: "no network" }))).toBe("failed (5 ms): no network");
  expect(summaryOf(entry("tool.request.web_search", { args: { query: "news" } }))).toBe("asks for query news");
  expect(summaryOf(entry("critique.result", { score: 0, feedback: "wrong" }))).toBe("0 of 5: wrong");
  expect(summaryOf(entry("critique.result", { score: null, feedback: "unread" }))).toBe("no grade: unread");
  expect(summaryOf(entry("settings.update", { participant: "critic", values: { attempts: 5 } }))).toBe("critic: attempts");
  expect(summaryOf(entry("tool.schema", { function: { name: "web_search" } }))).toBe("web_search");
  expect(summaryOf(entry("memory.classify", { id: "7-0:A", user_id: "ann" }))).toBe("what 7-0:A is about is to be told");
  expect(summaryOf(entry("knowledge.read", { response_id: "7-0:A", user_id: "ann" }))).toBe("facts of 7-0:A are to be read");
  expect(summaryOf(entry("pairwise.result", { winner: "tie", reason: "same" }))).toBe("as good as each other: same");
});

test("a payload of any form has a summary", () => {
  for (const payload of [null, "text", 3, [1], { query: 5 }]) expect(typeof summaryOf(entry("query.received", payload))).toBe("string");
  expect(summaryOf(entry("new.subject", { a: 1 }))).toBe("a 1");
  expect(summaryOf(entry("query.forget", { user_id: "ann", session_id: "", queries: ["1-0", "2-0"], at: 5, why: { a: 1 }, all: [1, 2, 3, 4], none: [] })))
    .toBe("user id ann · queries 1-0, 2-0 · at 5 · why a · all 4 of them · none none");
  expect(beginning("x".repeat(500))).toHaveLength(161);
});

test("a message belongs to its question, whichever field says so", () => {
  expect(questionOf(entry("query.received", {}))).toBe("1000-0");
  expect(questionOf(entry("response.generation", { query_id: "7-0" }))).toBe("7-0");
  expect(questionOf(entry("pairwise.result", { original_query_id: "7-0" }))).toBe("7-0");
  expect(questionOf(entry("critique.result", {}, { correlation_id: "8-0" }))).toBe("8-0");
});

test("filters hold together", () => {
  const one = entry("tool.request.web_search", { query_id: "7-0" }, { source: "generator/r1", session_id: "s1" });
  const all = { subject: "", session: "", question: "", participant: "" };
  expect(fits(one, all)).toBe(true);
  expect(fits(one, { ...all, subject: "tool.*", participant: "generator", session: "s", question: "7-0" })).toBe(true);
  expect(fits(one, { ...all, participant: "gen" })).toBe(false);
  expect(fits(one, { ...all, subject: "critique" })).toBe(false);
});

test("a waterfall begins with the question and lasts as long as each one works", () => {
  const log = [
    entry("response.generation", { query_id: "1000-0" }, { source: "generator/a", entry_id: "1900-0", time: "1900" }),
    entry("agent.transition", { query_id: "1000-0" }, { source: "generator/a", entry_id: "1000-5", time: "1000" }),
    entry("query.received", {}, { source: "gateway/g", time: "1001" }),
    entry("critique.result", { query_id: "9-0" }, { time: "2000" }),
  ];
  expect(spansOf(log, "1000-0").map(({ entry: { subject }, length }) => [subject, length])).toEqual([["query.received", 0], ["agent.transition", 900], ["response.generation", 0]]);
  expect(spansOf([], "1000-0")).toEqual([]);
});

test("what comes twice after a lost connection is shown once, newest first", () => {
  const a = entry("x", 1, { entry_id: "1-0" });
  const b = entry("x", 2, { entry_id: "2-0" });
  const older = entry("y", 3, { entry_id: "1-1", time: "500" });
  expect(joined([a], [b, older]).map((one) => one.entry_id)).toEqual(["2-0", "1-0", "1-1"]);
  expect(joined([a], [a, b]).map((one) => one.entry_id)).toEqual(["2-0", "1-0"]);
});

test("a waterfall still names what is gone from the bus", () => {
  const kept = entry("critique.result", { query_id: "1000-0" }, { source: "critic/c", entry_id: "3000-0", time: "3000" });
  const log = [{ subject: "query.received", id: "1000-0" }, { subject: "response.generation", id: "1900-0" }, { subject: "critique.result", id: "3000-0" }];
  expect(spansOf(withLog([kept], "1000-0", log), "1000-0").map(({ entry: { subject, payload }, start, length }) => [subject, payload !== undefined, start, length])).toEqual([
    ["query.received", false, 0, 0], ["response.generation", false, 900, 0], ["critique.result", true, 2000, 0],
  ]);
});
