// The HTTP API as the page uses it: requests with the key, answers as JSON, errors as sentences.

import type { Readiness } from "./types";

let key = "";
let onRefusedKey = () => {};
/** Aborts open requests at the sign-out; null: the user has signed out. */
let page: AbortController | null = new AbortController();

/** The API refused or could not be reached. `status` is 0 when nothing answered. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly retryAfter = 0,
  ) {
    super(message);
  }

  /** Whether the same request may succeed a moment later. */
  get temporary(): boolean {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** Use a key for all requests from now on; "" for none. `onRefused`: called when the server refuses the key. */
export function useKey(value: string, onRefused: () => void): void {
  key = value;
  onRefusedKey = onRefused;
  page = new AbortController();
}

/** Abort all requests and streams, and remove the key. Later requests never settle. */
export function endRequests(): void {
  key = "";
  onRefusedKey = () => {};
  // Drop the controller first: the reason of an abort refers to the stack with the former user's data.
  const ending = page;
  page = null;
  ending?.abort();
}

/** Return whether a key is valid. Raises ApiError when the server cannot be asked. */
export async function isGoodKey(value: string): Promise<boolean> {
  try {
    await send("GET", "sessions?limit=1", { headers: value ? { Authorization: `Bearer ${value}` } : {} });
    return true;
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return false;
    throw error;
  }
}

/** Exchange the token of a one-time link for a key. Raises ApiError. */
export async function redeem(token: string): Promise<{ key: string; user_id: string }> {
  return (await (await send("POST", "keys/redeem", { body: { token } })).json()) as { key: string; user_id: string };
}

interface Asked {
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal;
  keepalive?: boolean;
}

/** The response of a request that succeeded. A body that is a Blob is sent as it is. Raises ApiError. */
export async function request(method: string, path: string, { headers = {}, signal, ...rest }: Asked = {}): Promise<Response> {
  // Code of the former user must not send requests.
  if (!page) return new Promise(() => {});
  const { signal: signedOut } = page;
  const sent = key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
  // A `keepalive` request outlives the sign-out, too.
  const ending = rest.keepalive ? signal : signal ? AbortSignal.any([signal, signedOut]) : signedOut;
  try {
    return await send(method, path, { ...rest, headers: sent, signal: ending });
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) onRefusedKey();
    throw error;
  }
}

async function send(method: string, path: string, { body, headers = {}, signal, keepalive }: Asked): Promise<Response> {
  const raw = body instanceof Blob;
  let response: Response;
  try {
    response = await fetch(path, {
      method,
      signal,
      keepalive,
      headers: body === undefined || raw ? headers : { ...headers, "Content-Type": "application/json" },
      cache: "no-store",
      redirect: "error",
      credentials: "omit",
      body: body === undefined ? undefined : raw ? body : JSON.stringify(body),
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The gateway does not answer.");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

/** The JSON of a request that succeeded. */
export async function call<T>(method: string, path: string, body?: unknown, headers?: Record<string, string>): Promise<T> {
  const response = await request(method, path, { body, headers });
  return (await response.json()) as T;
}

/** GET /ready: it has the same form when the answer is 503. */
export async function readiness(): Promise<Readiness> {
  try {
    const response = await fetch("ready", { cache: "no-store", credentials: "omit" });
    return (await response.json()) as Readiness;
  } catch {
    const gateway = { ok: false, reason: "the gateway does not answer" };
    return { status: "not ready", message: "the gateway does not answer", parts: { gateway } } as unknown as Readiness;
  }
}

async function refusal(response: Response): Promise<ApiError> {
  const retryAfter = Number(response.headers.get("Retry-After")) || 0;
  try {
    const { error } = (await response.json()) as { error: { code: string; message: string } };
    return new ApiError(response.status, error.code, error.message, retryAfter);
  } catch {
    return new ApiError(response.status, `http_${response.status}`, `The gateway answered ${response.status}.`, retryAfter);
  }
}
