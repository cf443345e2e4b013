import { expect, it } from "vitest";
import told from "./folding.json";
import { apply, newTurn, sources, textOf, type Part, type Turn } from "./turn";

function shown(entries: unknown[], answer: string): Turn {
  const turn = newTurn("?");
  for (const [id, type, data] of entries as [string, string, object][]) apply(turn, type, id, type === "completed" ? { answer, ...data } : data);
  return turn;
}

/** The same with its text in one piece. */
const joined = (parts: readonly Part[]): unknown[] => parts.map((part) => ({
  ...part,
  ...("pieces" in part ? { pieces: textOf(part.pieces) } : {}),
  ...("parts" in part ? { parts: joined(part.parts) } : {}),
  // at which step of its loop the model asked is not shown
  ...("call" in part ? { call: { ...part.call, step: undefined } } : {}),
}));

it("a journal and what its session keeps of it show the same turn", () => {
  const [live, kept] = [told.journal, told.kept].map((entries) => shown(entries, told.answer)) as [Turn, Turn];
  expect(joined(kept.parts)).toEqual(joined(live.parts));
  expect(live.parts.map((part) => part.kind)).toEqual(["note", "persona", "persona", "thinking", "said", "tool", "note", "note", "thinking"]);
  expect(sources(kept)).toEqual([{ url: "https://a.example/x", title: "A page" }]);
  const rest = ({ parts: _, pieces, last: __, ...others }: Turn) => ({ ...others, text: textOf(pieces) });
  expect(rest(kept)).toEqual(rest(live));
  expect(kept.files).toMatchObject([{ id: "f1", name: "notes.txt" }]);
});
