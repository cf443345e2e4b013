// Prometheus' text format, as far as GET /metrics uses it.

export interface Sample {
  name: string;
  labels: Record<string, string>;
  value: number;
}

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

export function parsed(text: string): Sample[] {
  const found: Sample[] = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const match = LINE.exec(line);
    if (!match) continue;
    const value = match[3] === "+Inf" ? Infinity : Number(match[3]);
    if (Number.isNaN(value)) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map(([, name, words]) => [name!, words!.replace(/\\(.)/g, (_, letter: string) => (letter === "n" ? "\n" : letter))]));
    found.push({ name: match[1]!, labels, value });
  }
  return found;
}

/** The sum of a metric over all labels that fit; null when there is none. */
export function total(samples: readonly Sample[], name: string, fits: (labels: Record<string, string>) => boolean = () => true): number | null {
  const found = samples.filter((one) => one.name === name && Number.isFinite(one.value) && fits(one.labels));
  return found.length ? found.reduce((sum, one) => sum + one.value, 0) : null;
}

/** How much a counter grows a minute between two moments (in ms); null over a restart, when it began anew. */
export function perMinute(before: number | null, now: number | null, elapsed: number): number | null {
  return before === null || now === null || now < before || elapsed <= 0 ? null : ((now - before) * 60_000) / elapsed;
}
