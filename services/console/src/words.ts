// Numbers with their nouns.

/** Return a number with its noun: "1 row", "2 rows", "1,024 memories". `plural`: for nouns that need more than an s. */
export const counted = (number: number, noun: string, plural = `${noun}s`): string => `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;
