import { expect, test } from "vitest";
import { parsed, perMinute, total } from "./prometheus";

const TEXT = `# HELP a words
# TYPE a counter
a{route="/x",say="a \\"b\\" {c}"} 3
a{route="/y"} 4.5 1700000000
b 1e3
c{le="+Inf"} +Inf
d NaN
nonsense
`;

test("names, labels and numbers are read", () => {
  expect(parsed(TEXT)).toEqual([
    { name: "a", labels: { route: "/x", say: 'a "b" {c}' }, value: 3 },
    { name: "a", labels: { route: "/y" }, value: 4.5 },
    { name: "b", labels: {}, value: 1000 },
    { name: "c", labels: { le: "+Inf" }, value: Infinity },
  ]);
});

test("a metric's sum is over the labels that fit, and null where there is none", () => {
  const samples = parsed(TEXT);
  expect(total(samples, "a")).toBe(7.5);
  expect(total(samples, "a", (labels) => labels["route"] === "/y")).toBe(4.5);
  expect(total(samples, "z")).toBeNull();
});

test("a counter that began anew has no rate", () => {
  expect(perMinute(10, 15, 30_000)).toBe(10);
  expect(perMinute(10, 2, 30_000)).toBeNull();
  expect(perMinute(null, 2, 30_000)).toBeNull();
});
