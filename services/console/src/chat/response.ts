// What has happened in a response so far: its journal, reduced entry by entry. The cases are those of
// shared/records/response_state.py: both reduce the journals of tests/golden to the same state. Pure.

import type { components } from "../api/schema";
import type { JournalEvent, Usage } from "../api/types";

type Shapes = components["schemas"];
type Named<Name extends JournalEvent["event"]> = Extract<JournalEvent, { event: Name }>;

/** A member of a committee and its round; null: the answer's own. */
export type Speaker = readonly [persona: string, round: number] | null;

/** The text of one entry. */
interface Piece { id: string; text: string }

/** Text of one kind and speaker, with no other entry of the speaker in between. said: a tool call of its message follows. */
export interface Text { kind: "thinking" | "answer"; id: string; speaker: Speaker; pieces: Piece[]; said: boolean }
/** A tool call at the place of its request. */
export interface ToolCall { kind: "call"; id: string; speaker: Speaker; asked: Shapes["ToolAsked"] | null; answered: Shapes["ToolAnswered"] | null }
export interface Other { kind: "entry"; id: string; speaker: Speaker; entry: JournalEvent }
export type Part = Text | ToolCall | Other;

/** The parts in the order of their first entries. last: the id of the last entry. end: the terminal entry. */
export interface ResponseState {
  last: string;
  parts: Part[];
  end: Named<"completed" | "failed" | "cancelled"> | null;
}

const LATE: ReadonlySet<string> = new Set(["critique", "pairwise", "reward"]);

export const newResponse = (): ResponseState => ({ last: "", parts: [], end: null });

/** Take in one more entry. After the terminal entry only late ones count. Returns whether the entry counts. */
export function reduce(state: ResponseState, entry: JournalEvent): boolean {
  state.last = entry.id || state.last;
  if (state.end && !LATE.has(entry.event)) return false;
  switch (entry.event) {
    case "thinking":
    case "answer":
      addPiece(state.parts, entry);
      return true;
    case "tool.request":
      state.parts.push({ kind: "call", id: entry.id, speaker: speakerOf(entry), asked: entry.data, answered: null });
      return true;
    case "tool.result":
      addResult(state.parts, entry);
      return true;
    case "restarted":
      discard(state, entry);
      break;
    case "message":
      if (entry.data.tool_calls?.length) for (const text of textsOf(state, speakerOf(entry))) text.said = true;
      break;
    case "completed":
    case "failed":
    case "cancelled":
      state.end = entry;
      break;
    case "claimed":
    case "state":
    case "notice":
    case "attachments":
    case "context.truncated":
    case "persona.working":
    case "persona.done":
    case "critique":
    case "pairwise":
    case "reward":
      break;
    default:
      // a newer server may send types that this page does not know
      entry satisfies never;
      return false;
  }
  state.parts.push({ kind: "entry", id: entry.id, speaker: speakerOf(entry), entry });
  return true;
}

function speakerOf({ data }: JournalEvent): Speaker {
  const { persona, round = 0 }: { persona?: string; round?: number } = data as object;
  return persona ? [persona, round] : null;
}

const same = (one: Speaker, other: Speaker): boolean => one?.[0] === other?.[0] && one?.[1] === other?.[1];

function addPiece(parts: Part[], entry: Named<"thinking" | "answer">): void {
  const speaker = speakerOf(entry);
  const piece = { id: entry.id, text: entry.data.text };
  const last = parts.findLast((part) => same(part.speaker, speaker));
  if (last?.kind === entry.event) last.pieces.push(piece);
  else parts.push({ kind: entry.event, id: entry.id, speaker, pieces: [piece], said: false });
}

function addResult(parts: Part[], entry: Named<"tool.result">): void {
  const { id, data } = entry;
  const call = parts.find((part): part is ToolCall => part.kind === "call" && latest(part).call_id === data.call_id);
  if (call) call.answered = data;
  else parts.push({ kind: "call", id, speaker: speakerOf(entry), asked: null, answered: data });
}

const latest = ({ asked, answered }: ToolCall) => (answered ?? asked)!;

function discard(state: ResponseState, entry: Named<"restarted">): void {
  const { discard_after: given } = entry.data;
  const valid = /^\d+(-\d+)?$/.test(given) ? given : entry.id;
  for (const text of textsOf(state, speakerOf(entry))) {
    if (!text.said) text.pieces = text.pieces.filter(({ id }) => !isAfter(id, valid));
  }
  state.parts = state.parts.filter((part) => !isText(part) || part.pieces.length);
}

const isText = (part: Part): part is Text => part.kind === "thinking" || part.kind === "answer";

const textsOf = ({ parts }: ResponseState, speaker: Speaker): Text[] => parts.filter((part): part is Text => isText(part) && same(part.speaker, speaker));

/** The answer's text so far, without text that was said before a tool call. */
export const answerOf = (state: ResponseState): string => textsOf(state, null).filter(({ kind, said }) => kind === "answer" && !said).map(textOf).join("");

/** The data of all entries of a type, oldest first; of text and tool calls none. */
export function dataOf<Name extends JournalEvent["event"]>({ parts }: ResponseState, name: Name): Named<Name>["data"][] {
  return parts.flatMap((part) => (part.kind === "entry" && part.entry.event === name ? [part.entry.data as Named<Name>["data"]] : []));
}

/** Tokens of all whole messages, as far as the server counted them. */
export function spentOf(state: ResponseState): Usage {
  const messages = dataOf(state, "message");
  const sum = (name: "prompt_tokens" | "completion_tokens") => messages.reduce((all, message) => all + (message[name] ?? 0), 0);
  return { prompt_tokens: sum("prompt_tokens"), completion_tokens: sum("completion_tokens") };
}

// The joined text of a list that grows: a long answer has tens of thousands of pieces.
const joined = new WeakMap<readonly Piece[], { count: number; text: string }>();

/** The text of a part. Its pieces are only added to, or replaced by another list. */
export function textOf({ pieces }: Text): string {
  let { count, text } = joined.get(pieces) ?? { count: 0, text: "" };
  for (; count < pieces.length; count += 1) text += pieces[count]!.text;
  joined.set(pieces, { count, text });
  return text;
}

/** Whether entry or query id `a` comes after `b`. */
export function isAfter(a: string, b: string): boolean {
  const [high, low] = numbers(a);
  const [otherHigh, otherLow] = numbers(b);
  return high > otherHigh || (high === otherHigh && low > otherLow);
}

function numbers(id: string): [number, number] {
  const [high, low] = id.split("-");
  return [Number(high) || 0, Number(low) || 0];
}
