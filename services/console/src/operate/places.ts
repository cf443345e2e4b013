// The pages of operators, in the order of the list at their side.

export const PLACES = {
  participants: "Participants",
  health: "Health",
  bus: "Bus",
  metrics: "Metrics",
  "dead-letters": "Dead letters",
  memory: "Memory",
  knowledge: "Knowledge",
  critic: "Critic",
  ranking: "Leaderboard",
  experiments: "Experiments",
  retention: "Retention",
  keys: "Keys",
} as const;

export type Place = keyof typeof PLACES;

/** The page of an address: participants/critic/settings is a page and what of it is shown. */
export function placeOf(address: string): { place: Place; rest: string[] } {
  const [first = "", ...rest] = address.split("/");
  return first in PLACES ? { place: first as Place, rest } : { place: "participants", rest: [] };
}
