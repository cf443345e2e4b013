import { describe, expect, it } from "vitest";
import type { Session, TurnShown } from "../api/types";
import { asMarkdown, fileName } from "./exporting";
import { age, colourOf, verdictOf } from "../ui/parts";
import { rewardOf, voteOf, voted } from "./Judging";
import { grouped } from "./sessions";

const session = (id: string, updated: number, pinned = false): Session => ({ session_id: id, title: id, created: updated, updated, pinned, query_id: "", excerpt: "" });

it("sessions stand under the days of their last use", () => {
  const now = new Date(2026, 4, 20, 12).getTime();
  const day = 86_400_000;
  const list = [session("old but pinned", now - 90 * day, true), session("now", now), session("late", now - 13 * 3_600_000), session("week", now - 5 * day), session("month", now - 20 * day), session("march", new Date(2026, 2, 3).getTime())];
  expect(grouped(list, now).map(({ name, sessions }) => [name, sessions.length])).toEqual([["Pinned", 1], ["Today", 1], ["Yesterday", 1], ["Last 7 days", 1], ["Last 30 days", 1], ["March 2026", 1]]);
});

describe("a vote", () => {
  it("has a thumb and stars, of which one leaves the other", () => {
    expect(voted({ thumb: null, stars: 5 }, { thumb: "negative" })).toEqual({ thumb: "negative", stars: 5 });
    expect(voted({ thumb: "negative", stars: 5 }, { thumb: "positive" })).toEqual({ thumb: "positive", stars: 5 });
    expect(voted({ thumb: "positive", stars: null }, { stars: 2 })).toEqual({ thumb: "positive", stars: 2 });
  });

  it("is withdrawn by pressing again what is pressed", () => {
    expect(voted({ thumb: "positive", stars: 4 }, { thumb: "positive" })).toEqual({ thumb: null, stars: 4 });
    expect(voted({ thumb: "positive", stars: 4 }, { stars: 4 })).toEqual({ thumb: "positive", stars: null });
    expect(rewardOf(voted({ thumb: null, stars: 4 }, { stars: 4 }))).toBeNull();
  });

  it("is shown as the server has it", () => {
    expect(rewardOf({ thumb: "negative", stars: 5 })).toEqual({ reward: 1, sentiment: "positive", thumb: "negative", stars: 5, comment: null });
    expect(rewardOf({ thumb: null, stars: 3 })).toMatchObject({ reward: 0, sentiment: "positive", thumb: null });
    expect(voteOf(rewardOf({ thumb: "negative", stars: null }))).toEqual({ thumb: "negative", stars: null });
    expect(voteOf(null)).toEqual({ thumb: null, stars: null });
    // what does not say its parts
    expect(voteOf({ reward: -1, sentiment: "negative", stars: null, comment: null })).toEqual({ thumb: "negative", stars: null });
    expect(voteOf({ reward: 1, sentiment: "positive", stars: 5, comment: null })).toEqual({ thumb: null, stars: 5 });
  });
});

it("a conversation is saved with its questions quoted, under a name that every system takes", () => {
  const turn: TurnShown = { query_id: "1-0", after: null, query: "One\nand two?", answer: "**Both.**", time: 0, interrupted: false, attachments: [] };
  expect(asMarkdown("A\ntitle", [turn])).toBe("# A title\n\n## 1970-01-01 00:00\n\n> One\n> and two?\n\n**Both.**\n");
  expect(fileName("../a: b?/*")).toBe("a-b");
  expect(fileName("///")).toBe("conversation");
});

it("grades have colours, verdicts words, ages one unit", () => {
  expect([5, 4, 3, 2, 1, 0.5, null, undefined, "5"].map(colourOf)).toEqual(["good", "good", "fair", "poor", "poor", "", "", "", ""]);
  expect(["tie", "A", "B"].map((winner) => verdictOf(winner))).toEqual(["as good as the other", "better than the other", "the other was better"]);
  expect([5, 90, 7200, 200000, 40000000].map(age)).toEqual(["5 s ago", "1 min ago", "2 h ago", "2 d ago", "1 y ago"]);
});
