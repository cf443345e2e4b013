// The API's shapes by short names. They are generated from its description (make console-types).

import type { components } from "./schema";

type Shapes = components["schemas"];
export type Engram = Shapes["Engram"];
export type Hit = Shapes["Hit"];
export type WholeEngram = Shapes["WholeEngram"];
export type Fact = Shapes["Fact"];
export type Topic = Shapes["TopicShown"];
export type ChatSettings = Shapes["ChatSettings"];
export type QueryBody = Shapes["QueryBody"];
export type QueryListed = Shapes["QueryListed"];
export type QueryResult = Shapes["QueryResult"];
export type Readiness = Shapes["Readiness"];
export type Session = Shapes["SessionListed"];
export type SessionShown = Shapes["SessionShown"];
export type StoredFile = Shapes["StoredFile"];
export type TurnShown = Shapes["TurnShown"];
export type TurnTold = Shapes["TurnTold"];
export type Usage = Shapes["Usage"];
export type Critique = Shapes["CritiqueShown"];
export type Pairwise = Shapes["PairwiseShown"];
export type Reward = Shapes["RewardShown"];
export type Failure = Shapes["FailureShown"];

/** An entry of a journal: its type decides on its data. A newer server may send types that this page does not know. */
export type JournalEvent = Shapes["JournalEvent"];

/** A call of a tool as it is asked for, and later with its outcome. */
export interface Call {
  tool: string;
  args: Record<string, unknown>;
  result: string | null;
  call_id?: string;
  error?: string | null;
  data?: unknown;
  duration_ms?: number;
}
