// What a table shows: the rows that have the words that are looked for, in the order that is asked for.

export type Cell = string | number | boolean | null | undefined;

export interface Order {
  column: string;
  descending: boolean;
}

export const isMissing = (value: Cell): boolean => value === null || value === undefined || value === "";

/** Numbers by size, texts as people order them, what is not there last in either direction. */
export function compared(a: Cell, b: Cell, descending = false): number {
  if (isMissing(a) || isMissing(b)) return Number(isMissing(a)) - Number(isMissing(b));
  const order = typeof a === "string" || typeof b === "string"
    ? String(a).localeCompare(String(b), "en", { numeric: true, sensitivity: "base" })
    : Number(a) - Number(b);
  return descending ? -order : order;
}

/** The rows one of whose values has each of the words, in order; rows that are equal stay as they were. */
export function arranged<T>(rows: readonly T[], value: (row: T, column: string) => Cell, columns: readonly string[], words: string, order: Order | null): T[] {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = wanted.length
    ? rows.filter((row) => {
      const text = columns.map((column) => String(value(row, column) ?? "")).join("\n").toLowerCase();
      return wanted.every((word) => text.includes(word));
    })
    : [...rows];
  return order ? found.sort((a, b) => compared(value(a, order.column), value(b, order.column), order.descending)) : found;
}
