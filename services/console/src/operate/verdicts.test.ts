import { expect, test } from "vitest";
import { answersOf, verdictsOf } from "./verdicts";

const entry = (subject: string, payload: unknown) => ({ subject, payload, entry_id: "5-0", time: "5" });

test("a comparison finds both answers", () => {
  const log = [
    entry("response.generation", { query_id: "1-0", respondent_id: "A", query: "q", answer: "a", model: "m" }),
    entry("response.generation", { query_id: "1-0", respondent_id: "B", query: "q", answer: "b", model: "n" }),
    entry("pairwise.result", { original_query_id: "1-0", winner: "B", score_a: 3, score_b: 5, reason: "r" }),
    entry("critique.result", { query_id: "1-0", respondent_id: "B", score: null, feedback: "f", rubric: "style" }),
  ];
  expect(answersOf(log).get("1-0:B")?.text).toBe("b");
  const [pair, grade] = verdictsOf(log);
  expect(pair).toMatchObject({ kind: "comparison", question: "1-0", winner: "B", scoreA: 3, scoreB: 5, words: "r" });
  expect(grade).toMatchObject({ kind: "grade", respondent: "B", score: null, scoreA: null, rubric: "style", words: "f" });
});

test("a payload that is no object is no verdict of anybody", () => {
  expect(verdictsOf([entry("critique.result", null)])[0]).toMatchObject({ score: null, words: "", question: "" });
});
