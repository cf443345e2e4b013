import { expect, it } from "vitest";
import { counted } from "./words";

it.each([
  [0, "row", undefined, "0 rows"],
  [1, "row", undefined, "1 row"],
  [2, "row", undefined, "2 rows"],
  [1, "memory", "memories", "1 memory"],
  [1024, "memory", "memories", "1,024 memories"],
])("%s %s is counted with the right noun", (number, noun, plural, text) => {
  expect(counted(number, noun, plural)).toBe(text);
});

it("no other file chooses between singular and plural by itself", () => {
  const sources = import.meta.glob<string>("./**/*.{ts,tsx}", { query: "?raw", import: "default", eager: true });
  // A number in front of a plural noun, in a template string.
  const byHand = /\$\{[^{}]+\} (?:rows|turns|tokens|messages|files|days|pages|facts|names|replicas|personas|characters|conversations|settings|tools|stars|memories)\b/;
  const found = Object.entries(sources).filter(([name, text]) => !/\.test\.tsx?$/.test(name) && byHand.test(text));
  expect(found.map(([name]) => name)).toEqual([]);
});
