import { expect, it } from "vitest";
import told from "./folding.json";
import { answerOf, apply, finishOf, modelOf, newTurn, sources, stepsOf, trailOf, usageOf, type Step, type Turn } from "./turn";

function shown(entries: unknown[], answer: string): Turn {
  const turn = newTurn("?");
  for (const [id, type, data] of entries as [string, string, object][]) apply(turn, type, id, type === "completed" ? { answer, ...data } : data);
  return turn;
}

/** The same without the step of the model's loop at which it called a tool: the page does not show it. */
const steps = (list: readonly Step[]): unknown[] => list.map((step) => ({
  ...step,
  ...("steps" in step ? { steps: steps(step.steps) } : {}),
  ...("call" in step ? { call: { ...step.call, step: undefined } } : {}),
}));

it("a journal and what its session keeps of it show the same turn", () => {
  const [live, kept] = [told.journal, told.kept].map((entries) => shown(entries, told.answer)) as [Turn, Turn];
  expect(steps(stepsOf(kept))).toEqual(steps(stepsOf(live)));
  expect(stepsOf(live).map((step) => step.kind)).toEqual(["note", "persona", "persona", "thinking", "said", "tool", "note", "note", "thinking"]);
  expect(sources(kept)).toEqual([{ url: "https://a.example/x", title: "A page" }]);
  const rest = (turn: Turn) => [answerOf, finishOf, modelOf, trailOf, usageOf].map((of) => of(turn));
  expect(rest(kept)).toEqual(rest(live));
  const facts = ({ response: _, ...others }: Turn) => others;
  expect(facts(kept)).toEqual(facts(live));
  expect(kept.files).toMatchObject([{ id: "f1", name: "notes.txt" }]);
});
