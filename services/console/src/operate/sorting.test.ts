import { expect, test } from "vitest";
import { arranged, compared } from "./sorting";

const rows = [{ name: "b10", age: 3 }, { name: "b9", age: null }, { name: "A1", age: 20 }];
const value = (row: (typeof rows)[number], column: string) => row[column as "name" | "age"];
const shown = (words: string, order: Parameters<typeof arranged>[4]) => arranged(rows, value, ["name", "age"], words, order).map((row) => row.name);

test("numbers go by size and what is missing comes last in both directions", () => {
  expect(shown("", { column: "age", descending: false })).toEqual(["b10", "A1", "b9"]);
  expect(shown("", { column: "age", descending: true })).toEqual(["A1", "b10", "b9"]);
});

test("texts go as people order them", () => {
  expect(shown("", { column: "name", descending: false })).toEqual(["A1", "b9", "b10"]);
  expect(compared("x", "X")).toBe(0);
});

test("each word must be in one of the columns, in whatever case", () => {
  expect(shown("B", null)).toEqual(["b10", "b9"]);
  expect(shown("b 3", null)).toEqual(["b10"]);
  expect(shown("nothing", null)).toEqual([]);
});

test("the rows that were given stay as they are", () => {
  shown("", { column: "name", descending: true });
  expect(rows.map((row) => row.name)).toEqual(["b10", "b9", "A1"]);
});
