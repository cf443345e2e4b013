// The HTTP API as the page uses it: requests with the key, answers as JSON, errors as sentences.

import type { Readiness } from "./types";

const KEY = "local2.key";
let key = "";

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

/** Reads the key from where it was kept. */
export function loadKey(): string {
  key = read("sessionStorage") || read("localStorage") || "";
  return key;
}

/** Gets a key for the one-time link (`#once=…`) in the address, which is removed from it. Raises ApiError. */
export async function redeemLink(): Promise<void> {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const token = fragment.get("once");
  if (!token) return;
  fragment.delete("once");
  const rest = fragment.toString();
  history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
  const made = await call<{ key: string }>("POST", "keys/redeem", { token });
  // the link's key ends after a week by itself
  keepKey(made.key, true);
}

/** Uses a key from now on. Without `remember` it is forgotten when the tab is closed. */
export function keepKey(value: string, remember: boolean): void {
  forgetKey();
  key = value;
  write(remember ? "localStorage" : "sessionStorage", value);
}

export function forgetKey(): void {
  key = "";
  write("sessionStorage", null);
  write("localStorage", null);
}

interface Asked {
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal;
  keepalive?: boolean;
}

/** The response of a request that succeeded. A body that is a Blob is sent as it is. Raises ApiError. */
export async function request(method: string, path: string, { body, headers = {}, signal, keepalive }: Asked = {}): Promise<Response> {
  const sent: Record<string, string> = { ...headers };
  if (key) sent["Authorization"] = `Bearer ${key}`;
  const raw = body instanceof Blob;
  if (body !== undefined && !raw) sent["Content-Type"] = "application/json";
  let response: Response;
  try {
    response = await fetch(path, {
      method,
      signal,
      keepalive,
      headers: sent,
      cache: "no-store",
      redirect: "error",
      credentials: "omit",
      body: body === undefined ? undefined : raw ? (body as Blob) : JSON.stringify(body),
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

// Storage may be switched off in the browser; then the key lives as long as the page.
function read(storage: "sessionStorage" | "localStorage"): string | null {
  try {
    return window[storage].getItem(KEY);
  } catch {
    return null;
  }
}

function write(storage: "sessionStorage" | "localStorage", value: string | null): void {
  try {
    if (value === null) window[storage].removeItem(KEY);
    else window[storage].setItem(KEY, value);
  } catch {
    // as above
  }
}
