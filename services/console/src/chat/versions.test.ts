import { expect, it } from "vitest";
import { newTurn, type Turn } from "./turn";
import { inItsPlace, newestBehind, parents, rows } from "./versions";

const said = (n: number, after: string | null = null, change: Partial<Turn> = {}) => ({
  turn: newTurn(`q${n}`, { queryId: `${n}-0`, after, state: "completed", answer: `a${n}`, ...change }),
});
// 1 ─ 2 ─ 3          and behind 1 also 4 ─ 5, a version of 2, and 6 once more behind 2, beside 3
const TREE = [said(1), said(2), said(3), said(4, "1-9"), said(5), said(6, "2-0")];
const shown = (chosen: string | null) => rows(TREE, chosen).map(({ versions, at }) => `${versions[at]!.turn.query}${versions.length > 1 ? ` ${at + 1}/${versions.length}` : ""}`);

it("each turn stands behind the newest that was not accepted after the one that is named", () => {
  expect(parents(TREE)).toEqual([-1, 0, 1, 0, 3, 1]);
  // on an earlier page, or gone
  expect(parents([said(7, "3-0")])).toEqual([-1]);
});

it("one conversation is shown, and where there are versions, which one it is", () => {
  expect(shown(null)).toEqual(["q1", "q2 1/2", "q6 2/2"]);
  expect(shown("4-0")).toEqual(["q1", "q4 2/2", "q5"]);
  expect(shown("3-0")).toEqual(["q1", "q2 1/2", "q3 1/2"]);
  expect(shown("9-0")).toEqual(shown(null));
  expect(rows([], null)).toEqual([]);
});

it("a version is shown with what was said behind it last", () => {
  expect([0, 1, 2, 3].map((at) => newestBehind(parents(TREE), at))).toEqual([5, 5, 2, 4]);
});

it("a version that is on its way stands last, and one that failed stands aside once something is said behind the others", () => {
  const own = { turn: newTurn("q2", { after: "1-0" }) };
  expect(parents([said(1), said(2), own])).toEqual([-1, 0, 0]);
  const failed = said(3, "1-0", { state: "failed", answer: "" });
  expect(rows([said(1), said(2), failed], null).at(-1)!.at).toBe(1);
  expect(rows([said(1), said(2), failed, said(4)], null).map(({ versions, at }) => versions[at]!.turn.query)).toEqual(["q1", "q2", "q4"]);
});

it("other words take what was said in their place and behind it away, and not themselves", () => {
  const own = { turn: newTurn("other words", { after: "1-0" }) };
  const turns = [...TREE, own];
  expect([...inItsPlace(turns, TREE[3]!)].map(({ turn }) => turn.query)).toEqual(["q2", "q3", "q4", "q5", "q6"]);
});
