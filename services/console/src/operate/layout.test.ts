import { expect, test } from "vitest";
import { placed } from "./layout";

const node = (id: string) => ({ id, name: id, kind: "thing" as const });
const edge = (from: string, to: string) => ({ id: `${from}-${to}`, from, to, relation: "knows", state: "is" as const, since: null, until: null, confidence: 1 });

test("all nodes stand apart from each other, inside the frame, at the same place each time", () => {
  const graph = { nodes: ["a", "b", "c", "d"].map(node), edges: [edge("a", "b"), edge("b", "c")] };
  const { spots, lines, frame: [left, top, width, height] } = placed(graph);
  for (const one of spots) {
    expect(one.x).toBeGreaterThan(left);
    expect(one.x).toBeLessThan(left + width);
    expect(one.y).toBeGreaterThan(top);
    expect(one.y).toBeLessThan(top + height);
    for (const other of spots) if (one !== other) expect(Math.hypot(one.x - other.x, one.y - other.y)).toBeGreaterThan(30);
  }
  expect(lines).toHaveLength(2);
  expect(placed(graph).spots.map(({ x, y }) => [x, y])).toEqual(spots.map(({ x, y }) => [x, y]));
});

test("an edge to a node that is not there is left out", () => {
  expect(placed({ nodes: [node("a")], edges: [edge("a", "z")] }).lines).toEqual([]);
  expect(placed({ nodes: [], edges: [] }).spots).toEqual([]);
});
