import { ApiError } from "./http";

/** The browser's IANA time zone; null where the browser names none. */
export const timeZone = (): string | null => new Intl.DateTimeFormat().resolvedOptions().timeZone || null;

/** Ask with the browser's time zone; without one, where the server does not know it: a zone may be newer than the
    server's list, and must not refuse what is asked. Raises ApiError. */
export async function inZone<T>(ask: (zone: string | null) => Promise<T>): Promise<T> {
  const zone = timeZone();
  try {
    return await ask(zone);
  } catch (error) {
    if (zone && error instanceof ApiError && error.status === 422) return ask(null);
    throw error;
  }
}
