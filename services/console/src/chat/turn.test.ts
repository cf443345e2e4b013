import { describe, expect, it } from "vitest";
import { isAfter } from "./response";
import { answerOf, apply, modelOf, newTurn, sources, stepsOf, usageOf, type Turn } from "./turn";

type Entry = [id: string, type: string, data: unknown];

function after(...entries: Entry[]): Turn {
  const turn = newTurn("?");
  for (const [id, type, data] of entries) apply(turn, type, id, data);
  return turn;
}

const call = { call_id: "c", tool: "web_search", args: { q: 1 } };
const result = { ...call, result: "r", error: null, data: [{ title: "A page", url: "https://a.example/x" }], duration_ms: 3 };

describe("a journal as a turn", () => {
  it("keeps the order of what happened, and what was said before a call", () => {
    const turn = after(
      ["1-1", "claimed", { model: "m" }],
      ["1-2", "thinking", { text: "first" }],
      ["1-3", "answer", { text: "I search. " }],
      ["1-4", "message", { tool_calls: [{ name: "t" }], prompt_tokens: 5, completion_tokens: 2 }],
      ["1-5", "tool.request", call],
      ["1-6", "tool.result", result],
      ["1-7", "thinking", { text: "second" }],
      ["1-8", "answer", { text: "It is" }],
      ["1-9", "completed", { answer: "It is so.", usage: { prompt_tokens: 9, completion_tokens: 4 }, model: "m", finish_reason: "stop" }],
    );
    expect(stepsOf(turn).map((part) => part.kind)).toEqual(["thinking", "said", "tool", "thinking"]);
    expect(answerOf(turn)).toBe("It is so.");
    expect([turn.state, modelOf(turn), usageOf(turn)]).toEqual(["completed", "m", { prompt_tokens: 9, completion_tokens: 4 }]);
    expect(sources(turn)).toEqual([{ url: "https://a.example/x", title: "A page" }]);
  });

  it("takes an entry once", () => {
    const turn = after(["1-1", "answer", { text: "a" }], ["1-1", "answer", { text: "a" }], ["1-2", "answer", { text: "b" }], ["1-1", "answer", { text: "a" }]);
    expect(answerOf(turn)).toBe("ab");
  });

  it("discards the void text of a restart and nothing else", () => {
    const turn = after(
      ["1-1", "thinking", { text: "kept" }],
      ["1-2", "tool.request", call],
      ["1-3", "tool.result", result],
      ["1-4", "thinking", { text: "void" }],
      ["1-5", "answer", { text: "void" }],
      ["2-1", "claimed", {}],
      ["2-2", "restarted", { discard_after: "1-3", step: 1 }],
      ["2-3", "answer", { text: "new" }],
    );
    expect(answerOf(turn)).toBe("new");
    expect(stepsOf(turn).map((part) => part.kind)).toEqual(["thinking", "tool", "note"]);
  });

  it("discards a persona's void text", () => {
    const turn = after(
      ["1-1", "answer", { text: "void", persona: "Analyst", round: 1 }],
      ["2-1", "restarted", { discard_after: "1-0", step: 0, persona: "Analyst", round: 1 }],
      ["2-2", "answer", { text: "new", persona: "Analyst", round: 1 }],
      ["2-3", "persona.done", { persona: "Analyst", round: 1 }],
      ["2-4", "answer", { text: "The Self" }],
    );
    const [persona] = stepsOf(turn);
    expect(persona?.kind === "persona" && [persona.text, persona.done]).toEqual(["new", true]);
    expect(answerOf(turn)).toBe("The Self");
  });

  it("ends with a reason, and keeps what was written", () => {
    const failed = after(["1-1", "answer", { text: "so far" }], ["1-2", "failed", { code: "deadline", message: "too late" }]);
    expect([failed.state, failed.error, answerOf(failed)]).toEqual(["failed", { code: "deadline", message: "too late" }, "so far"]);
    const stopped = after(["1-1", "answer", { text: "so" }], ["1-2", "cancelled", { answer: "so far", thinking: "" }]);
    expect([stopped.state, answerOf(stopped)]).toEqual(["cancelled", "so far"]);
  });

  it("takes grades and votes behind its end, and types that it does not know", () => {
    const turn = after(
      ["1-1", "completed", { answer: "a" }],
      ["1700000000000-0", "critique", { score: 4, feedback: "f", rubric: "r" }],
      ["1700000000000-1", "reward", { reward: 1, sentiment: "positive", stars: 5, comment: null }],
      ["1700000000000-2", "from.a.newer.version", null],
    );
    expect([turn.critique?.score, turn.reward?.stars, turn.state]).toEqual([4, 5, "completed"]);
  });

  it("orders ids by their numbers", () => {
    expect(isAfter("10-1", "9-9")).toBe(true);
    expect(isAfter("1-10", "1-9")).toBe(true);
    expect(isAfter("1-9", "1-9")).toBe(false);
  });

  it("names as sources what can be opened by a click, each once", () => {
    const turn = after(["1-1", "tool.result", { ...result, data: [{ url: "javascript:alert(1)" }, { url: "https://b.example" }, { url: "https://b.example", title: "B" }, 7] }]);
    expect(sources(turn)).toEqual([{ url: "https://b.example", title: "B" }]);
  });
});

it("joins what has come to what was joined before, and begins anew when some of it is void", () => {
  const turn = newTurn("?");
  let text = "";
  for (let n = 1; n <= 50; n += 1) {
    apply(turn, "answer", `2-${n}`, { text: `${n} ` });
    text += `${n} `;
    expect(answerOf(turn)).toBe(text);
  }
  apply(turn, "restarted", "2-51", { discard_after: "2-3" });
  expect(answerOf(turn)).toBe("1 2 3 ");
  apply(turn, "answer", "2-52", { text: "again" });
  expect(answerOf(turn)).toBe("1 2 3 again");
});
