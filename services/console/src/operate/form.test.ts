import { expect, test } from "vitest";
import { blamed, changes, fieldsOf, read, same, written } from "./form";

const SCHEMA = {
  properties: {
    concurrency: { type: "integer", default: 1, minimum: 1, maximum: 64, description: "How many" },
    level: { type: "string", default: "info", pattern: "^(debug|info)$" },
    think: { type: "boolean", default: true },
    temperature: { anyOf: [{ type: "number", minimum: 0, maximum: 2 }, { type: "null" }], default: null, description: "Sampling" },
    rerank: { type: "string", enum: ["none", "model"], default: "model" },
    rubrics: { type: "object", additionalProperties: { type: "string" }, default: {} },
    weights: { $ref: "#/$defs/Weights", default: { keyword: 0.45, age: 0.1 } },
    model: { type: "string", minLength: 1, default: "m" },
  },
  $defs: { Weights: { type: "object", properties: { keyword: { type: "number", minimum: 0 }, age: { type: "number", default: 9 } } } },
};
const VALUES = { concurrency: 1, level: "info", think: true, temperature: null, rerank: "model", rubrics: {}, weights: { keyword: 0.45, age: 0.2 }, model: "m" };
const fields = fieldsOf(SCHEMA, VALUES);
const field = (id: string) => fields.find((one) => one.id === id)!;

test("each kind of schema is a field of its kind", () => {
  expect(fields.map(({ id, kind }) => [id, kind])).toEqual([
    ["concurrency", "number"], ["level", "choice"], ["think", "switch"], ["temperature", "number"], ["rerank", "choice"],
    ["rubrics", "json"], ["weights.keyword", "number"], ["weights.age", "number"], ["model", "text"],
  ]);
  expect(field("temperature")).toMatchObject({ optional: true, range: "0 or more, at most 2", description: "Sampling" });
  expect(field("weights.age")).toMatchObject({ value: 0.2, default: 0.1 });
});

test("words are read as the schema says", () => {
  expect(read(field("concurrency"), "3")).toEqual({ value: 3 });
  expect(read(field("concurrency"), "1.5")).toEqual({ wrong: "This must be a whole number." });
  expect(read(field("concurrency"), "0")).toEqual({ wrong: "This must be 1 or more, at most 64." });
  expect(read(field("concurrency"), "")).toEqual({ wrong: "This must be a number." });
  expect(read(field("temperature"), "")).toEqual({ value: null });
  expect(read(field("rubrics"), "{")).toEqual({ wrong: "This is not JSON." });
  expect(read(field("model"), "")).toEqual({ wrong: "This must not be empty." });
  expect(read(field("level"), "loud")).toEqual({ wrong: "This must be one of debug, info." });
  expect(written(field("temperature"), null)).toBe("");
});

test("only what is different is sent, and parts as their whole setting", () => {
  expect(changes(fields, { concurrency: "1", think: false, "weights.age": "0.3" })).toEqual({ values: { think: false, weights: { keyword: 0.45, age: 0.3 } }, wrong: {} });
  expect(changes(fields, { "weights.age": "0.3", "weights.keyword": "0.5" }).values).toEqual({ weights: { keyword: 0.5, age: 0.3 } });
  expect(changes(fields, { concurrency: "x" })).toEqual({ values: {}, wrong: { concurrency: "This must be a number." } });
});

test("a complaint of the API is shown at its field", () => {
  expect(blamed(fields, "concurrency: 99 is greater than the maximum of 64")).toBe("concurrency");
  expect(blamed(fields, "weights.keyword: -1 is less than the minimum of 0")).toBe("weights.keyword");
  expect(blamed(fields, "rubrics.web_fetch: 'x' is not one of")).toBe("rubrics");
  expect(blamed(fields, "the bus cannot be reached")).toBeNull();
});

test("objects are the same whatever the order of their names", () => {
  expect(same({ a: 1, b: [1, 2] }, { b: [1, 2], a: 1 })).toBe(true);
  expect(same({ a: 1 }, { a: 1, b: 2 })).toBe(false);
});
