// Grades, comparisons and answers, out of the messages of the bus.

import type { BusEntry } from "./asking";
import { questionOf, timeOf } from "./summary";

export interface Answer {
  query: string;
  text: string;
  model: string;
}

export interface Verdict {
  id: string;
  kind: "grade" | "comparison";
  time: number;
  question: string;
  respondent: string;
  score: number | null;
  winner: string;
  scoreA: number | null;
  scoreB: number | null;
  rubric: string;
  words: string;
  entry: BusEntry;
}

const text = (value: unknown): string => (typeof value === "string" ? value : "");
const number = (value: unknown): number | null => (typeof value === "number" ? value : null);
const payloadOf = (entry: BusEntry) => (typeof entry.payload === "object" && entry.payload !== null ? (entry.payload as Record<string, unknown>) : {});

/** The answers by question and respondent: 1-0:A. */
export function answersOf(entries: readonly BusEntry[]): Map<string, Answer> {
  const found = new Map<string, Answer>();
  for (const entry of entries) {
    if (entry.subject !== "response.generation") continue;
    const payload = payloadOf(entry);
    found.set(`${text(payload["query_id"])}:${text(payload["respondent_id"]) || "A"}`, { query: text(payload["query"]), text: text(payload["answer"]), model: text(payload["model"]) });
  }
  return found;
}

/** What the judge said, in the order of the messages. */
export function verdictsOf(entries: readonly BusEntry[]): Verdict[] {
  return entries.filter(({ subject }) => subject === "critique.result" || subject === "pairwise.result").map((entry) => {
    const payload = payloadOf(entry);
    const grade = entry.subject === "critique.result";
    const respondent = text(payload["respondent_id"]);
    const score = grade ? number(payload["score"]) : null;
    return {
      id: `${entry.subject} ${entry.entry_id}`, kind: grade ? "grade" : "comparison", time: timeOf(entry), entry, score,
      question: text(payload["query_id"]) || text(payload["original_query_id"]) || questionOf(entry),
      respondent: grade ? respondent : "A and B",
      winner: text(payload["winner"]),
      scoreA: grade ? (respondent === "A" ? score : null) : number(payload["score_a"]),
      scoreB: grade ? (respondent === "B" ? score : null) : number(payload["score_b"]),
      rubric: text(payload["rubric"]),
      words: text(payload["feedback"]) || text(payload["reason"]),
    };
  });
}
