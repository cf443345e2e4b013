// Why a memory was found: the parts of its ranking as sentences, the heaviest first.

const WORDS: Record<string, string> = {
  critic: "the judge's grade", winner: "it won its comparison", feedback: "a person's vote",
  age: "its age", lift: "words of the conversation around it", shift: "other circumstances",
};

export interface Reason {
  words: string;
  value: number | null;
}

/** What a search says of a hit, in order of weight; names that this page does not know are shown as they are. */
export function reasonsOf(why: Record<string, unknown>): Reason[] {
  const number = (name: string) => (typeof why[name] === "number" ? (why[name] as number) : null);
  const found: Reason[] = [];
  const relevance = number("relevance");
  if (relevance !== null) found.push({ words: "how well it fits the question", value: relevance });
  const added = Object.entries(why).filter(([name, value]) => typeof value === "number" && Math.abs(value) >= 0.0005 && !["relevance", "similarity", "keyword_rank", "keyword_score", "shift"].includes(name)) as [string, number][];
  added.sort(([, a], [, b]) => Math.abs(b) - Math.abs(a));
  for (const [name, value] of added) found.push({ words: WORDS[name] ?? name.replaceAll("_", " "), value });
  const similarity = number("similarity");
  if (similarity !== null) found.push({ words: `similar in meaning: ${similarity.toFixed(2)} of 1`, value: null });
  const rank = number("keyword_rank");
  if (rank !== null) found.push({ words: `number ${rank} by its words`, value: null });
  return found;
}

export function signed(value: number, digits = 2): string {
  const size = Math.abs(value).toFixed(digits);
  return (value < 0 && Number(size) ? "−" : "+") + size;
}

/** The ends of an axis that has room for every interval, a little more than needed. */
export function axisOf(rows: readonly { low: number; high: number }[]): { from: number; to: number } {
  const from = Math.min(0, ...rows.map((row) => row.low));
  const to = Math.max(0, ...rows.map((row) => row.high));
  const room = (to - from || 1) * 0.05;
  return { from: from - room, to: to + room };
}
