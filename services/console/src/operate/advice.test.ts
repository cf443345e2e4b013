import { expect, test } from "vitest";
import { advice, warningsOf } from "./advice";

test("a part that is well needs no advice, one that is not says what to do", () => {
  expect(advice("model", { ok: true })).toBe("");
  expect(advice("model", { ok: true, demo: true })).toContain("script");
  expect(advice("bus", { ok: false })).toContain("Redis");
  expect(advice("something new", { ok: false })).toBe("Its log says why.");
});

test("what replicas say is told once for each participant", () => {
  const sick = { state: "ready", facts: { backend_ok: false, backend_reason: "no server", gpu_note: "computes on the CPU" } };
  expect(warningsOf([{ name: "generator", replicas: [sick, sick] }]).map((one) => one.words)).toEqual(["no server", "computes on the CPU"]);
  expect(warningsOf([{ name: "memory", replicas: [{ state: "ready", facts: { store_ok: false } }] }])[0]?.words).toBe("Its store is not well.");
  expect(warningsOf([{ name: "critic", replicas: [], work: [{ subject: "x", backlog: 3, pending: 0 }] }])[0]?.words).toContain("3 messages wait");
  expect(warningsOf([{ name: "memory", replicas: [{ state: "ready", facts: { store_ok: true, degraded: null } }] }])).toEqual([]);
});
