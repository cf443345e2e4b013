// What stays in this browser: drafts, what a chat is asked with, how the page looks.

const PREFIX = "local2.";

/** The value of that name, or what is given when there is none, or storage is switched off. */
export function kept<T>(name: string, otherwise: T): T {
  try {
    const raw = localStorage.getItem(PREFIX + name);
    return raw === null ? otherwise : (JSON.parse(raw) as T);
  } catch {
    return otherwise;
  }
}

export function keep(name: string, value: unknown): void {
  try {
    if (value === null || value === "") localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // storage is switched off or full: it lasts as long as the page
  }
}
