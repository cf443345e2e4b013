import { ApiError } from "./http";

/** Return the browser's IANA time zone; null if the browser names none. */
export const timeZone = (): string | null => new Intl.DateTimeFormat().resolvedOptions().timeZone || null;

/** Ask with the browser's time zone, and again without it if the server does not know it: a zone newer than the server's
    list must not fail the request. Raises ApiError. */
export async function inZone<T>(ask: (zone: string | null) => Promise<T>): Promise<T> {
  const zone = timeZone();
  try {
    return await ask(zone);
  } catch (error) {
    if (zone && error instanceof ApiError && error.status === 422) return ask(null);
    throw error;
  }
}
