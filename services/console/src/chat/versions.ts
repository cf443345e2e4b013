// Which turns of a session are one conversation, and which are versions of each other. Pure.

import { isAfter } from "./response";
import { answerOf, isOver, type Turn } from "./turn";

/** A place in the conversation: the turns that are versions of each other, oldest first, and which one is shown. */
export interface Row<T> {
  versions: T[];
  at: number;
}

interface Holds {
  readonly turn: Turn;
}

/** A version that brought no answer: what is said next does not stand behind it. */
const empty = ({ turn }: Holds): boolean => turn.after !== null && isOver(turn) && (turn.state === "failed" || !answerOf(turn));

/** The place of the turn before each; -1 for one that begins a conversation. */
export function parents(turns: readonly Holds[]): number[] {
  return turns.map(({ turn: { after } }, at) => {
    let before = at - 1;
    if (after === null) while (before >= 0 && empty(turns[before]!)) before -= 1;
    else while (before >= 0 && (!turns[before]!.turn.queryId || isAfter(turns[before]!.turn.queryId, after))) before -= 1;
    return before;
  });
}

/** The place of the newest turn behind one, or of itself. */
export function newestBehind(known: readonly number[], at: number): number {
  let last = at;
  const behind = new Set([at]);
  known.forEach((parent, place) => {
    if (!behind.has(parent)) return;
    behind.add(place);
    last = place;
  });
  return last;
}

/** The conversation that ends behind the turn `chosen`; null, or one that is not there: the newest. */
export function rows<T extends Holds>(turns: readonly T[], chosen: string | null): Row<T>[] {
  const known = parents(turns);
  const start = chosen === null ? -1 : turns.findIndex(({ turn }) => turn.queryId === chosen);
  const beside = new Map<number, number[]>();
  known.forEach((parent, at) => beside.set(parent, [...(beside.get(parent) ?? []), at]));
  const found: Row<T>[] = [];
  for (let at = start < 0 ? turns.length - 1 : newestBehind(known, start); at >= 0; at = known[at]!) {
    const places = beside.get(known[at]!)!;
    found.push({ versions: places.map((place) => turns[place]!), at: places.indexOf(at) });
  }
  return found.reverse();
}

/** Everything that stands in the place of a turn or behind it, but the newest turn itself: what other words take away. */
export function inItsPlace<T extends Holds>(turns: readonly T[], one: T): Set<T> {
  const known = parents(turns);
  const place = known[turns.indexOf(one)];
  const gone = new Set<number>();
  known.forEach((parent, at) => {
    if (at < turns.length - 1 && (parent === place || gone.has(parent))) gone.add(at);
  });
  return new Set([...gone].map((at) => turns[at]!));
}
