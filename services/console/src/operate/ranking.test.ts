import { expect, test } from "vitest";
import { axisOf, reasonsOf, signed } from "./ranking";

test("a ranking is explained by its parts, the heaviest first", () => {
  const why = { similarity: 0.15, keyword_rank: 1, keyword_score: 1, lift: 0, relevance: 0.53, critic: 0.04, winner: 0, feedback: 0.1, age: -0.2, shift: 0.14, novel: 0.01 };
  expect(reasonsOf(why).map(({ words, value }) => [words, value])).toEqual([
    ["how well it fits the question", 0.53], ["its age", -0.2], ["a person's vote", 0.1], ["the judge's grade", 0.04], ["novel", 0.01],
    ["similar in meaning: 0.15 of 1", null], ["number 1 by its words", null],
  ]);
  expect(reasonsOf({})).toEqual([]);
  expect(signed(-0.2)).toBe("−0.20");
  expect(signed(-0.0001)).toBe("+0.00");
});

test("an axis has room for every interval", () => {
  const { from, to } = axisOf([{ low: -2, high: 1 }, { low: 0.5, high: 3 }]);
  expect(from).toBeLessThan(-2);
  expect(to).toBeGreaterThan(3);
  expect(axisOf([])).toEqual({ from: -0.05, to: 0.05 });
});
