// The HTTP API as the page uses it: requests with the key, answers as JSON, errors as sentences.

const KEY = "local2.key";
let key = "";

/** The API refused or could not be reached. `status` is 0 when nothing answered. */
export class ApiError extends Error {
  constructor(status, code, message, retryAfter = 0) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }

  /** Whether the same request may succeed a moment later. */
  get temporary() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** Reads the key from where it was kept. */
export function loadKey() {
  key = read("sessionStorage") || read("localStorage") || "";
  return key;
}

/** Gets a key for the one-time link (`#once=…`) in the address, which is removed from it. Raises ApiError. */
export async function redeemLink() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const token = fragment.get("once");
  if (!token) return;
  fragment.delete("once");
  const rest = fragment.toString();
  history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
  const made = await call("POST", "keys/redeem", { token });
  keepKey(made.key, false);
}

/** Uses a key from now on. Without `remember` it is forgotten when the tab is closed. */
export function keepKey(value, remember) {
  forgetKey();
  key = value;
  write(remember ? "localStorage" : "sessionStorage", value);
}

export function forgetKey() {
  key = "";
  write("sessionStorage", null);
  write("localStorage", null);
}

/** The response of a request that succeeded. Raises ApiError. */
export async function request(method, path, { body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, signal, headers: sent, cache: "no-store", redirect: "error", credentials: "omit",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The gateway does not answer.");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

/** The JSON of a request that succeeded. */
export async function call(method, path, body, headers) {
  const response = await request(method, path, { body, headers });
  return response.json();
}

/** GET /ready: it has the same form when the answer is 503. */
export async function readiness() {
  try {
    const response = await fetch("ready", { cache: "no-store", credentials: "omit" });
    return await response.json();
  } catch {
    return { status: "unreachable", parts: { gateway: { ok: false, reason: "the gateway does not answer" } } };
  }
}

async function refusal(response) {
  const retryAfter = Number(response.headers.get("Retry-After")) || 0;
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.code, error.message, retryAfter);
  } catch {
    return new ApiError(response.status, `http_${response.status}`, `The gateway answered ${response.status}.`, retryAfter);
  }
}

// Storage may be switched off in the browser; then the key lives as long as the page.
function read(storage) {
  try {
    return window[storage].getItem(KEY);
  } catch {
    return null;
  }
}

function write(storage, value) {
  try {
    if (value === null) window[storage].removeItem(KEY);
    else window[storage].setItem(KEY, value);
  } catch { /* as above */ }
}
