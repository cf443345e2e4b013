import { expect, it } from "vitest";
import type { JournalEvent, QueryResult } from "../api/types";
import { answerOf as answerSoFar, newResponse, reduce, spentOf, textOf, type Part, type ResponseState } from "./response";
import { answerOf, apply, finishOf, modelOf, newTurn, usageOf } from "./turn";

interface Golden {
  entries: [id: string, fields: { type: string; data: string }][];
  state: unknown;
  outputs: { result?: QueryResult; states_while_it_runs: string };
}

// The same journals as in tests/golden/test_golden.py.
const texts = import.meta.glob<string>(["../../../../tests/golden/journals/*.json", "../../../../tests/golden/odd.json"], { eager: true, query: "?raw", import: "default" });
const goldens = Object.entries(texts).map(([path, text]): [name: string, golden: Golden] => [
  path.split("/").at(-1)!,
  JSON.parse(text.replace(/\{\{x\*(\d+)\}\}/g, (_, count: string) => "x".repeat(Number(count)))) as Golden,
]);

async function digest(text: string): Promise<string> {
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text)));
  return `${[...text].length} ${[...hash.slice(0, 8)].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

const short = async (text: string): Promise<string> => ([...text].length <= 200 ? text : digest(text));

/** A state in the form of tests/golden/states.py. */
const form = async (state: ResponseState) => ({
  last: state.last,
  end: state.end?.event ?? null,
  answer: await short(answerSoFar(state)),
  spent: spentOf(state),
  parts: await Promise.all(state.parts.map(async (part) => ({ id: part.id, ...(await formOfPart(part)) }))),
});

async function formOfPart(part: Part) {
  const { speaker } = part;
  if (part.kind === "entry") return { kind: part.entry.event, speaker };
  if (part.kind !== "call") return { kind: part.kind, speaker, text: await short(textOf(part)), said: part.said };
  const { asked, answered } = part;
  const { call_id, tool } = (answered ?? asked)!;
  const ended = answered && { result: await short(answered.result), error: answered.error ?? null };
  return { kind: "call", speaker, asked: asked !== null, call_id, tool, answered: ended };
}

it("there are golden journals", () => expect(goldens.length).toBeGreaterThan(20));

const journalOf = ({ entries }: Golden) => entries.map(([id, { type, data }]) => ({ id, event: type, data: JSON.parse(data) as unknown }));

it.each(goldens)("%s gives the same state after every entry as on the server", async (_, golden) => {
  const response = newResponse();
  const states = [];
  for (const entry of journalOf(golden)) {
    reduce(response, entry as JournalEvent);
    states.push(await form(response));
  }
  expect(states.at(-1)).toEqual(golden.state);
  expect(await digest(states.map((one) => JSON.stringify(one)).join("\n"))).toBe(golden.outputs.states_while_it_runs);
});

it.each(goldens.filter(([, { outputs }]) => outputs.result))("%s gives a turn with the facts of the JSON answer", (_, golden) => {
  const turn = newTurn("golden");
  for (const { id, event, data } of journalOf(golden)) apply(turn, event, id, data);
  const result = golden.outputs.result!;
  expect([turn.state, modelOf(turn), turn.error]).toEqual([result.state, result.model, result.error ?? null]);
  expect([turn.critique, turn.pairwise, turn.reward]).toEqual([result.critique ?? null, result.pairwise ?? null, result.reward ?? null]);
  expect([answerOf(turn), usageOf(turn)]).toEqual([result.answer, result.usage]);
  if (turn.state === "completed") expect(finishOf(turn)).toBe(result.finish_reason);
});
